"""Times what surrounds the attention of Gated MLA on one GPU: the kernels against the torch expressions, same inputs.

    python benchmarks/gated_mla.py                                  # k3_proxy: 32,768 tokens, 24 heads
    python benchmarks/gated_mla.py --shape "8192, 96" --peaks       # K3's heads; with the peaks that FP8 asks for

A shape is tokens, heads; channels are 128 of a key's own, 64 that all heads share, 128 of a value, in BF16. Times are the
device's (`device_time.py`), forward and backward apart. GB/s counts what has to move: every input read and every output
written once, so torch's passes over more than that show as a lower rate. torch's values are a view, which attention kernels
copy: that copy is counted to its time. `of copy` is the share of the bandwidth of a large copy, measured first.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from device_time import device_ms

from k3kernels.gated_mla import assemble_keys, sigmoid_gate
from k3kernels.peaks import PEAKS

NOPE, SHARED, VALUE, LATENT = 128, 64, 128, 512


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def keys(T: int, H: int, backend: str) -> tuple[Callable[[], Sequence[Tensor]], list[Tensor]]:
    """The call, and its leaves."""
    kv, latent = normal(T, H, NOPE + VALUE).requires_grad_(), normal(T, LATENT + SHARED)
    shared = latent[:, LATENT:].requires_grad_()

    def call() -> Sequence[Tensor]:
        k, v = assemble_keys(kv, shared, NOPE, backend=backend)
        return k, v.contiguous()

    return call, [kv, shared]


def gate(T: int, H: int, backend: str) -> tuple[Callable[[], Sequence[Tensor]], list[Tensor]]:
    """The call, and its leaves."""
    leaves = [normal(T, H * VALUE).requires_grad_() for _ in range(2)]
    return lambda: [sigmoid_gate(*leaves, backend=backend)], leaves


def times(call: Callable[[], Sequence[Tensor]], leaves: list[Tensor]) -> tuple[float, float]:
    """Milliseconds of forward and of backward."""
    out = call()
    given = [normal(*x.shape) for x in out]

    def backward() -> None:
        torch.autograd.grad(out, leaves, given, retain_graph=True)
        PEAKS.forget()

    def forward() -> None:
        call()
        PEAKS.forget()

    return device_ms(forward), device_ms(backward)


def gigabytes(name: str, T: int, H: int) -> tuple[float, float]:
    """What forward and backward must move."""
    if name == "gate":
        values = 3 * H * VALUE, 5 * H * VALUE
    else:
        once = H * (NOPE + VALUE) + SHARED + H * (NOPE + SHARED) + H * VALUE
        values = once, once
    return values[0] * T * 2 / 1e9, values[1] * T * 2 / 1e9


def copy_rate() -> float:
    """GB/s read and written by a large copy."""
    x = normal(2**29)
    y = torch.empty_like(x)
    return 4 * x.numel() / device_ms(lambda: y.copy_(x)) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="tokens, heads; may be given several times")
    parser.add_argument("--peaks", action="store_true", help="kernels note the largest magnitudes for FP8")
    options = parser.parse_args()
    PEAKS.wanted = options.peaks
    copy = copy_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}; copy {copy:.0f} GB/s"
    )
    print("| T, H | what | provider | fwd ms | bwd ms | GB/s fwd | GB/s bwd | of copy, fwd | of copy, bwd |")
    print("|---|---|---|---|---|---|---|---|---|")
    for T, H in [tuple(int(x) for x in s.split(",")) for s in options.shape or ["32768, 24"]]:
        for name, make in (("keys", keys), ("gate", gate)):
            for backend in ("triton", "torch"):
                found = times(*make(T, H, backend))
                rates = [moved / ms * 1e3 for moved, ms in zip(gigabytes(name, T, H), found)]
                print(
                    f"| {T}, {H} | {name} | {backend} | {found[0]:.3f} | {found[1]:.3f} | {rates[0]:.0f} | {rates[1]:.0f} "
                    f"| {rates[0] / copy:.0%} | {rates[1] / copy:.0%} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
