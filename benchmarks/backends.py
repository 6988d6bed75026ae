"""Parts of a layer on each GPU backend: milliseconds forward and backward, TFLOP/s, and host time a call.

    python benchmarks/backends.py [--json out.json]

Shapes are those of model=k3_proxy (16384 tokens) and of one K3-width layer (56 of 896 experts). FP8 times include
quantising inputs, weights and gradients. `host` is the time the host needs to issue one forward and backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "data")]

TOKENS = 16384
PRODUCTS = {"proxy q_proj": (1792, 3072), "K3 q_proj": (7168, 12288), "proxy down": (8448, 1792)}
GROUPS = {"proxy experts": (128, 4 * TOKENS, 896, 768), "K3 experts": (56, 131072, 3584, 3072)}
"""Experts, rows, in, out."""
ATTENTION = {"proxy": 24, "K3": 96}
"""Heads of (192, 128)."""


def timed(run: Callable[[], None], repeats: int = 12) -> tuple[float, float]:
    """Device milliseconds and host milliseconds of one call, medians."""
    import torch

    for _ in range(4):
        run()
    torch.cuda.synchronize()
    device, host = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        host.append((time.perf_counter() - begin) * 1e3)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(4_000_000)  # the device waits until the host has queued the call
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end))
    return statistics.median(device), statistics.median(host)


def arms() -> dict[str, Any]:
    """Backends that run here, by name."""
    import torch

    from k3train.config.precision import Precision
    from k3train.errors import EnvironmentError_
    from k3train.model.backend import make_backend

    cuda, found = torch.device("cuda"), {}
    for name, backend, recipe in [
        ("torch", "torch", None), ("te", "te", None), ("te fp8_block", "te", "fp8_block"),
        ("te fp8_current", "te", "fp8_current"),
    ]:  # fmt: skip
        try:
            found[name] = make_backend(backend, cuda, precision=Precision(recipe))
        except EnvironmentError_ as error:
            print(f"{name}: not run ({error})")
    return found


def measure() -> list[dict[str, Any]]:
    import torch
    import torch.nn.functional as F

    from k3train.model.backend.te import TEBackend, TEProduct
    from k3train.model.context import PackedStream

    rows: list[dict[str, Any]] = []
    backends = arms()

    def tensor(*shape: int, std: float = 1.0) -> Any:
        return (torch.randn(*shape, device="cuda") * std).bfloat16()

    def add(part: str, name: str, flops: float, step: Callable[[], Any]) -> None:
        try:
            milliseconds, host = timed(step)
        except Exception as error:  # an arm that cannot run is a row that says so
            rows.append({"part": part, "backend": name, "error": str(error).strip().splitlines()[0][:120]})
            print(rows[-1], flush=True)
            return
        rows.append({"part": part, "backend": name, "ms": milliseconds, "host_ms": host,
                     "tflops": flops / milliseconds / 1e9 if flops else None})  # fmt: skip
        rate = f"{rows[-1]['tflops']:7.0f} TFLOP/s" if flops else ""
        print(f"{part:22} {name:16} {milliseconds:8.3f} ms  host {host:7.3f} ms {rate}", flush=True)

    def both(function: Callable[..., Any], *inputs: Any) -> Callable[[], None]:
        leaves = [x.requires_grad_() for x in inputs]
        grad = torch.randn_like(function(*leaves))

        def step() -> None:
            function(*leaves).backward(grad)
            for leaf in leaves:
                leaf.grad = None

        return step

    for part, (inputs, outputs) in PRODUCTS.items():
        for name, backend in backends.items():
            x, w = tensor(TOKENS, inputs), torch.nn.Parameter(tensor(outputs, inputs, std=0.02))
            flops = 6.0 * TOKENS * inputs * outputs
            if not isinstance(backend, TEBackend):
                add(part, name, flops, both(F.linear, x, w))
                continue
            product = TEProduct()
            product.weight, product.library, product.recipe = w, backend.library, backend.recipe
            add(part, name, flops, both(lambda a, b, p=product: p(a), x, w))
            if backend.recipe is None:
                w.main_grad, w.grad_added_to_main_grad = torch.zeros_like(w, dtype=torch.float32), False
                add(part, "te, fp32 wgrad", flops, both(lambda a, b, p=product: p(a), x, w))
    for part, (experts, count, inputs, outputs) in GROUPS.items():
        share = torch.softmax(torch.randn(experts, generator=torch.Generator().manual_seed(0)) * 0.3, 0)
        sizes = (share * count).long()
        sizes[0] += count - sizes.sum()
        counts = sizes.cuda()
        for name, backend in backends.items():
            if name == "te":
                continue  # the same product as torch's
            x, w = tensor(count, inputs), torch.nn.Parameter(tensor(experts, outputs, inputs, std=0.02))
            step = both(lambda a, b, k=backend, c=counts: k.grouped_linear(a, b, c), x, w)
            add(part, name, 6.0 * count * inputs * outputs, step)
    cuts = torch.arange(0, TOKENS + 1, 2048, dtype=torch.int32, device="cuda")
    cuts[2:-2] += 100
    for part, heads in ATTENTION.items():
        for label, cu, length in (
            (f"{part} MLA, packed", cuts, 8192),
            (f"{part} MLA, 1 document", cuts[[0, -1]], TOKENS),
        ):
            spans = (cu[1:] - cu[:-1]).double().cpu()
            flops = 3.5 * float((spans * spans).sum()) * heads * (192 + 128)  # causal, backward counted 2.5 times
            for name in ("torch", "te"):
                if name not in backends:
                    continue
                stream = PackedStream(cu, TOKENS, length)
                q, k, v = tensor(TOKENS, heads, 192), tensor(TOKENS, heads, 192), tensor(TOKENS, heads, 128)
                run = both(lambda a, b, c, k=backends[name], s=stream: k.attention(a, b, c, s, 192**-0.5), q, k, v)
                add(label, name, flops, run)
    for name, backend in backends.items():
        if name in ("torch", "te"):
            x, w = tensor(TOKENS, 1792), torch.nn.Parameter(tensor(1792))

            def torch_norm(a: Any, b: Any) -> Any:
                a32 = a.float()
                return b * (a32 * torch.rsqrt(a32.square().mean(-1, keepdim=True) + 1e-5)).to(a.dtype)

            norm = (lambda a, b, k=backend: k.library.rms_norm(a, b, 1e-5)) if name == "te" else torch_norm
            add("RMSNorm 1792", name, 0.0, both(norm, x, w))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from k3train import platform

    platform.install()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/backends.py needs a GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {TOKENS} tokens, forward and backward")
    rows = measure()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
