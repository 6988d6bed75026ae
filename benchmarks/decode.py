"""Decoding on one GPU: a model of KDA and MLA layers against the same model with MLA in every layer.

    python benchmarks/decode.py                     # k3_proxy, 1K to 1M tokens of context, one to two minutes
    python benchmarks/decode.py --contexts 1024,65536 --model k3_proxy
    python benchmarks/decode.py --tiny              # k3_tiny on a CPU: shows that it runs, its times mean nothing

    python benchmarks/decode.py --profile 8         # also: the kernels of a step at the longest context, by time

Weights are random and the cache is filled with noise, since neither changes the time. A step decodes one token of every
sequence through `Decoder.step`, as generation does: a captured graph on a GPU. tokens/s is batch over the median time
of a step, device drained on both sides. `KDA ms` is the time of all KDA mixers of a step (projections, convolutions,
state) against the same cache, captured as a graph of their own. The largest batch is the largest for which cache and a
step fit the memory of the device: an estimate from shapes, lowered until a step succeeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from k3train.platform import install

install()  # before megatron is imported: a machine without a GPU needs its adapter

from k3train.config.compose import compose  # noqa: E402
from k3train.config.schema import ModelConfig, expand_pattern  # noqa: E402
from k3train.inference import decoder as decoding  # noqa: E402
from k3train.inference.backend import InferenceBackend  # noqa: E402
from k3train.inference.cache import Cache, LatentCache, bytes_per_token, new_cache  # noqa: E402
from k3train.inference.loading import start_process  # noqa: E402
from k3train.model.kda import KDA  # noqa: E402
from k3train.parallel.layout import Layout  # noqa: E402

CPU_MEMORY = 4_000_000  # bytes that --tiny pretends to have for caches
SPARE = 2 * 2**30  # for a step's activations and graphs


@dataclass
class Row:
    """One measurement; seconds of a step and of its KDA mixers."""

    context: int
    batch: int
    step: float
    kda: float
    cache_bytes: int

    @property
    def rate(self) -> float:
        return self.batch / self.step


def timed(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median seconds of a call, device drained on both sides."""
    times = []
    for _ in range(rounds):
        drain(device)
        begin = time.perf_counter()
        call()
        drain(device)
        times.append(time.perf_counter() - begin)
    return sorted(times)[rounds // 2]


@torch.no_grad()
def kda_time(decoder: decoding.Decoder, cache: Cache, rounds: int) -> float:
    """Seconds of every KDA mixer, one after another, for one token of each sequence; 0 without KDA layers."""
    ctx = decoder.model.ctx
    layers = [m for m in decoder.model.modules() if isinstance(m, KDA)]
    if not layers:
        return 0.0
    step = decoding.Step(cache, [1] * cache.batch, ctx.device)
    x = torch.randn(cache.batch, ctx.model.hidden_size, device=ctx.device).to(ctx.dtype)

    def mixers() -> None:
        for layer in layers:
            step.attend_kda(layer, x)

    if ctx.device.type == "cpu":
        return timed(mixers, ctx.device, rounds)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        mixers()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixers()
    graph.replay()
    return timed(graph.replay, ctx.device, 3 * rounds)


def build(model: ModelConfig, layout: Layout, device: torch.device) -> decoding.Decoder:
    from k3train.engine.megatron import training_dtype
    from k3train.model.build import build_chunks, chunks_of_rank, make_context

    ctx = make_context(model, layout, training_dtype("auto", device), device)
    ctx.backend = InferenceBackend()
    return decoding.Decoder(build_chunks(ctx, chunks_of_rank(model, layout.sizes, 0, None), seed=0)[0])


def filled_cache(decoder: decoding.Decoder, batch: int, context: int, steps: int) -> Cache:
    ctx = decoder.model.ctx
    cache = new_cache(ctx.model, batch, context + steps, dtype=ctx.dtype, device=ctx.device)
    for layer in cache.layers.values():
        if isinstance(layer, LatentCache):
            layer.latents.normal_()
    cache.lengths += context
    cache.note([context] * batch)
    return cache


def drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


WARM = decoding.PLAIN_STEPS + 1


def measure(decoder: decoding.Decoder, batch: int, context: int, steps: int) -> Row:
    """A few steps to warm up, then `steps` timed ones, the last of which ends at `context` + steps + WARM tokens."""
    device = decoder.model.ctx.device
    cache = filled_cache(decoder, batch, context, steps + WARM)
    tokens = torch.ones(batch, dtype=torch.int64, device=device)
    for _ in range(WARM):
        decoder.step(tokens, cache)
    step = timed(lambda: decoder.step(tokens, cache), device, steps)
    decoder.forget()
    return Row(context, batch, step, kda_time(decoder, cache, steps), cache.bytes())


def profile(decoder: decoding.Decoder, batch: int, context: int, name: str) -> None:
    """The kernels of one step by their time, graph and all."""
    device = decoder.model.ctx.device
    cache = filled_cache(decoder, batch, context, WARM + 2)
    tokens = torch.ones(batch, dtype=torch.int64, device=device)
    for _ in range(WARM):
        decoder.step(tokens, cache)
    drain(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        decoder.step(tokens, cache)
        drain(device)
    decoder.forget()
    found: dict[str, list[float]] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name, []).append(event.time_range.elapsed_us())
    total = sum(sum(times) for times in found.values())
    count = sum(len(times) for times in found.values())
    print(f"{name} at {context}, batch {batch}: {count} kernels, {total / 1e3:.3f} ms in them")
    for kernel, times in sorted(found.items(), key=lambda item: -sum(item[1]))[:22]:
        print(f"  {sum(times):9.1f} us {len(times):5} x {kernel[:100]}")
    sys.stdout.flush()


def forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def largest(decoder: decoding.Decoder, context: int, steps: int) -> Row:
    """The row at the largest batch that fits; batch 0 is never returned: one sequence that does not fit raises."""
    ctx = decoder.model.ctx
    model = ctx.model
    forget()
    free = torch.cuda.mem_get_info()[0] - SPARE if ctx.device.type == "cuda" else CPU_MEMORY
    linear = new_cache(model, 1, 0, dtype=ctx.dtype, device=ctx.device).bytes()
    width = torch.finfo(ctx.dtype).bits // 8
    each = bytes_per_token(model, width) * (context + steps + WARM) + linear
    batch = max(1, int(free / each))
    while True:
        try:
            return measure(decoder, batch, context, steps)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        forget()  # outside the handler, whose traceback would hold the tensors
        batch = min(batch - 1, int(batch * 0.96))


def show(name: str, row: Row) -> Row:
    kda = f"{row.kda * 1e3:8.3f}" if row.kda else f"{'-':>8}"
    times = f"{name:16} {row.context:9} {row.batch:6} {row.step * 1e3:9.3f} {row.rate:10.1f} {kda}"
    print(f"{times} {row.cache_bytes / 2**30:10.2f}", flush=True)
    return row


def sweep(decoder: decoding.Decoder, name: str, contexts: list[int], batches: list[int], steps: int) -> dict[str, Row]:
    """Batch 1 at every context; at the longest one also `batches` and the largest. Keys: context, =batch, largest."""
    rows = {}
    for context in contexts:
        rows[str(context)] = show(name, measure(decoder, 1, context, steps))
        forget()
    for batch in batches:
        rows[f"={batch}"] = show(name, measure(decoder, batch, contexts[-1], steps))
        forget()
    rows["largest"] = show(name, largest(decoder, contexts[-1], steps))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="k3_tiny on a CPU")
    parser.add_argument("--model", default="k3_proxy")
    parser.add_argument("--contexts", default="1024,8192,65536,262144,1048576")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--profile", default="", help="batches to list kernels for, as 1,8")
    options = parser.parse_args()
    if options.tiny:
        options.model, options.contexts, options.steps = "k3_tiny", "16,64", 2
    elif not torch.cuda.is_available():
        sys.exit("benchmarks/decode.py: needs a CUDA device (or --tiny)")
    contexts = [int(c) for c in options.contexts.split(",")]
    device = start_process()
    from k3train.parallel import layout as layouts

    layout = layouts.initialize(layouts.Sizes())
    hybrid = dataclasses.replace(compose([f"model={options.model}"]).model, backend="local")
    layers = expand_pattern(hybrid.pattern, hybrid.hybrid)
    every = dataclasses.replace(hybrid, pattern=f"F*{len(layers)}")
    bytes_ratio = len(layers) / layers.count("F")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}; {hybrid.name}: {len(layers)} layers, {layers.count('F')} of them MLA")
    print(f"{'model':16} {'context':>9} {'batch':>6} {'step ms':>9} {'tokens/s':>10} {'KDA ms':>8} {'cache GiB':>10}")
    decoder = build(every, layout, device)
    theirs = sweep(decoder, "MLA everywhere", contexts, [], options.steps)
    profiled = [int(b) for b in options.profile.split(",") if b]
    for batch in profiled:
        profile(decoder, batch, contexts[-1], "MLA everywhere")
        forget()
    del decoder
    forget()
    both = theirs["largest"].batch
    decoder = build(hybrid, layout, device)
    ours = sweep(decoder, "KDA and MLA", contexts, [both] if both > 1 else [], options.steps)

    for batch in profiled:
        profile(decoder, batch, contexts[-1], "KDA and MLA")
        forget()
    last = str(contexts[-1])
    equal = ours[f"={both}" if both > 1 else last]
    most = theirs["largest"].rate
    print(f"at {last} tokens, tokens/s against MLA everywhere (cache bytes allow {bytes_ratio:.2f} at equal batch):")
    print(f"  batch 1: {ours[last].rate / theirs[last].rate:.2f}")
    print(f"  batch {both}, the largest that both fit: {equal.rate / most:.2f}")
    print(f"  each at its largest, {ours['largest'].batch} and {both}: {ours['largest'].rate / most:.2f}")
    times = [ours[str(c)].kda for c in contexts]
    print(f"KDA layers a token from {contexts[0]} to {last}: {min(times) * 1e3:.3f} to {max(times) * 1e3:.3f} ms, "
          f"{max(times) / min(times) - 1:+.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
