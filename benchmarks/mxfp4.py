"""Packed MXFP4 experts on one GPU: the grouped product against BF16, and quantisation against a copy.

    python benchmarks/mxfp4.py                # about a minute
    python benchmarks/mxfp4.py --tune         # also tries other tiles at 16 tokens (a minute more)
    python benchmarks/mxfp4.py --tiny         # small sizes on a CPU: shows that it runs, its times mean nothing

56 experts (896 over 16 GPUs) of [3072, 3584], the same number of tokens each. `bf16` is torch's grouped_mm on decoded
weights, as the model calls it. Both are timed as CUDA graphs of ten calls, whole calls with everything that they
launch, in alternating rounds; the number is the median. The weights are far larger than the cache, so none is flushed.
The limit of the ratio is that of the bytes: 16 / 4.25 = 3.76. `error` is max|d| / max|y| against the BF16 product.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from k3kernels.mxfp4 import decode, mxfp4_grouped_linear
from k3train.weights import mxfp4

TOKENS = (1, 4, 16, 64)
CALLS = 10  # in a graph
LARGEST = 121  # scale byte: 2**-6


def timer(call: Callable[[], object], device: str) -> Callable[[], float]:
    """A function that returns seconds a call on the device."""
    if device == "cpu":

        def on_cpu() -> float:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin

        return on_cpu
    for _ in range(3):
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()

    def on_gpu() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / CALLS

    return on_gpu


def medians(timers: list[Callable[[], float]], rounds: int) -> list[float]:
    times: list[list[float]] = [[] for _ in timers]
    for i in range(rounds):
        order = range(len(timers)) if i % 2 == 0 else reversed(range(len(timers)))
        for j in order:
            times[j].append(timers[j]())
    return [sorted(t)[rounds // 2] for t in times]


def bf16_product(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    return torch.cat([a @ w.T for a, w in zip(x.split(counts.tolist()), weight)])


def tiles_to_try(tokens: int) -> list[tuple[int, ...]]:
    rows = max(16, min(64, tokens))
    shapes = ((64, 1, 4), (64, 2, 4), (64, 4, 4), (128, 1, 4), (128, 2, 4), (128, 1, 8), (128, 2, 8), (256, 1, 8))
    return [(rows, *shape, stages) for shape in shapes for stages in (2, 3, 4)]


def grouped(experts: int, out: int, width: int, device: str, rounds: int, tune: bool) -> None:
    generator = torch.Generator(device).manual_seed(0)
    packed = torch.randint(0, 256, (experts, out, width // 2), generator=generator, device=device, dtype=torch.uint8)
    scale = torch.randint(
        116, LARGEST + 1, (experts, out, width // 32), generator=generator, device=device, dtype=torch.uint8
    )
    weight = torch.stack([decode(p, s, torch.bfloat16) for p, s in zip(packed, scale)])
    print(f"grouped product, {experts} experts of [{out}, {width}]")
    print(
        f"{'tokens/expert':>13} {'bf16 us':>9} {'mxfp4 us':>9} {'ratio':>6} {'bf16 TB/s':>9} {'mxfp4 TB/s':>10} {'error':>8}"
    )
    for tokens in TOKENS:
        x = torch.randn(experts * tokens, width, generator=generator, device=device).bfloat16()
        counts = torch.full((experts,), tokens, device=device)

        def ours(x: torch.Tensor = x, counts: torch.Tensor = counts) -> torch.Tensor:
            return mxfp4_grouped_linear(x, packed, scale, counts, largest_scale=LARGEST)

        def theirs(x: torch.Tensor = x, counts: torch.Tensor = counts) -> torch.Tensor:
            return bf16_product(x, weight, counts)

        want = theirs()
        error = float((ours() - want).abs().max() / want.abs().max())
        bf16, mx = medians([timer(theirs, device), timer(ours, device)], rounds)
        rates = (weight.nbytes / bf16 / 1e12, (packed.nbytes + scale.nbytes) / mx / 1e12)
        times = f"{tokens:13} {bf16 * 1e6:9.1f} {mx * 1e6:9.1f} {bf16 / mx:6.2f}"
        print(f"{times} {rates[0]:9.2f} {rates[1]:10.2f} {error:8.1e}", flush=True)
        if tune and tokens == 16:
            tune_tiles(x, packed, scale, counts, tokens, bf16)


def tune_tiles(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, counts: torch.Tensor, tokens: int, bf16: float
) -> None:
    from k3kernels.mxfp4.triton_linear import Tile, grouped_linear_triton

    found = []
    for sizes in tiles_to_try(tokens):
        tile = Tile(*sizes)
        try:
            call = timer(partial(grouped_linear_triton, x, packed, scale, counts, tile, LARGEST), "cuda")
            found.append((medians([call], 7)[0], tile))
        except Exception as failure:  # a tile that needs more than the device has
            print(f"    {tile}: {failure!r:.80}")
    for seconds, tile in sorted(found)[:5]:
        print(f"    {seconds * 1e6:9.1f} us, ratio {bf16 / seconds:.2f}: {tile}", flush=True)


def quantisation(experts: int, out: int, width: int, device: str, rounds: int) -> None:
    """Round to nearest, the whole call with its checks and its one wait for the device."""
    weight = (0.02 * torch.randn(experts, out, width, device=device)).bfloat16()
    copy = torch.empty_like(weight)
    moved = weight.numel() * (2 + 0.5 + 1 / 32)

    def once(call: Callable[[], object]) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    print(f"quantisation, {experts} experts of [{out}, {width}] in bf16")
    print(f"{'rule':>6} {'ms':>8} {'TB/s':>7} {'copy TB/s':>9} {'of a copy':>9} {'of 4.8 TB/s':>11}")
    for rule in ("even", "mse"):

        def ours(rule: str = rule) -> object:
            return mxfp4.quantise(weight, scales=rule)  # type: ignore[arg-type]

        once(ours)
        copied, took = medians([lambda: once(lambda: copy.copy_(weight)), lambda: once(ours)], rounds)
        rate, yard = moved / took / 1e12, 2 * weight.nbytes / copied / 1e12
        print(f"{rule:>6} {took * 1e3:8.2f} {rate:7.3f} {yard:9.3f} {rate / yard:9.2f} {rate / 4.8:11.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--tune", action="store_true", help="try other tiles")
    options = parser.parse_args()
    if options.tiny:
        grouped(3, 96, 128, "cpu", 3, tune=False)
        quantisation(3, 96, 128, "cpu", 3)
        return
    if not torch.cuda.is_available():
        sys.exit("benchmarks/mxfp4.py: needs a CUDA device (or --tiny)")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    grouped(56, 3072, 3584, "cuda", 15, options.tune)
    torch.cuda.empty_cache()
    quantisation(56, 3072, 3584, "cuda", 15)


if __name__ == "__main__":
    main()
