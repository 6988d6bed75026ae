"""Round-to-nearest MXFP4 of K3-shaped experts on one GPU, against the bandwidth of its memory.

    python benchmarks/quantise_experts.py

56 experts (896 over 16 GPUs) of w1, w3 [3072, 3584] and w2 [3584, 3072] in bfloat16. Bytes moved: 2 read, 0.5 + 1/32
written a weight. The yardsticks are a copy of the same size on the same device, and the 4.8 TB/s of the data sheet.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

from k3train.weights import mxfp4, mxfp4_triton

EXPERTS, SHAPES = 56, {"w1 or w3": (3072, 3584), "w2": (3584, 3072)}
DATA_SHEET = 4.8e12
REPEATS = 20


def seconds(call: Callable[[], object]) -> float:
    """Median time of a call on the device."""
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[REPEATS // 2]


def main() -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    for name, (out, width) in SHAPES.items():
        stack = (0.02 * torch.randn(EXPERTS, out, width, device="cuda")).bfloat16()
        rows, copy = stack.view(-1, width), torch.empty_like(stack)
        moved = stack.numel() * (2 + 0.5 + 1 / 32)
        copied = 2 * stack.nbytes / seconds(lambda: copy.copy_(stack))  # noqa: B023
        result: dict[str, object] = {"matrix": name, "experts": EXPERTS, "copy_TB/s": round(copied / 1e12, 3)}
        for rule in ("even", "mse"):
            kernel = moved / seconds(lambda: mxfp4_triton.quantise_rows(rows, search=rule == "mse"))  # noqa: B023
            whole = moved / seconds(lambda: mxfp4.quantise(stack, scales=rule))  # type: ignore[arg-type]  # noqa: B023
            result |= {
                f"{rule}_kernel_TB/s": round(kernel / 1e12, 3),
                f"{rule}_kernel_of_copy": round(kernel / copied, 3),
                f"{rule}_kernel_of_data_sheet": round(kernel / DATA_SHEET, 3),
                f"{rule}_with_checks_TB/s": round(whole / 1e12, 3),
            }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    main()
