"""Decoding on one GPU: a model of KDA and MLA layers against the same model with MLA in every layer.

    python benchmarks/decode.py                     # k3_proxy, 1K to 1M tokens of context, one to two minutes
    python benchmarks/decode.py --contexts 1024,65536 --model k3_proxy
    python benchmarks/decode.py --tiny              # k3_tiny on a CPU: shows that it runs, its times mean nothing

Weights are random and the cache is filled with noise, since neither changes the time. A step decodes one token of every
sequence through `k3train.inference.decoder`, as generation does. tokens/s is batch over the median time of a step,
device drained on both sides. `KDA ms` is the time of all KDA mixers (projections, convolutions, state) of a step,
between events on the device. The largest batch is the largest for which cache and a step fit the memory of the device:
an estimate from shapes, lowered until a step succeeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from dataclasses import dataclass

import torch

from k3train.platform import install

install()  # before megatron is imported: a machine without a GPU needs its adapter

from k3train.config.compose import compose  # noqa: E402
from k3train.config.schema import ModelConfig, expand_pattern  # noqa: E402
from k3train.inference import decoder as decoding  # noqa: E402
from k3train.inference.cache import Cache, LatentCache, bytes_per_token, new_cache  # noqa: E402
from k3train.inference.loading import start_process  # noqa: E402
from k3train.model.kda import KDA  # noqa: E402
from k3train.parallel.layout import Layout  # noqa: E402

CPU_MEMORY = 4_000_000  # bytes that --tiny pretends to have for caches


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


class TimedKDA:
    """Adds up the time of every KDA mixer while active."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.seconds = 0.0
        self.inner = decoding._Step.attend_kda

    def __enter__(self) -> TimedKDA:
        timed, inner = self, self.inner

        def attend(step: decoding._Step, layer: KDA, x: torch.Tensor) -> torch.Tensor:
            if timed.device.type == "cpu":
                begin_s = time.perf_counter()
                out = inner(step, layer, x)
                timed.seconds += time.perf_counter() - begin_s
                return out
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            out = inner(step, layer, x)
            end.record()
            timed.spans.append((begin, end))
            return out

        decoding._Step.attend_kda = attend  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        decoding._Step.attend_kda = self.inner  # type: ignore[method-assign]

    def take(self) -> float:
        """Seconds since the last call; the device must be drained."""
        total = self.seconds + sum(begin.elapsed_time(end) / 1e3 for begin, end in self.spans)
        self.seconds, self.spans = 0.0, []
        return total


def build(model: ModelConfig, layout: Layout, device: torch.device) -> decoding.Decoder:
    from k3train.engine.megatron import training_dtype
    from k3train.model.build import build_chunks, chunks_of_rank, make_context

    ctx = make_context(model, layout, training_dtype("auto", device), device)
    return decoding.Decoder(build_chunks(ctx, chunks_of_rank(model, layout.sizes, 0, None), seed=0)[0])


def filled_cache(decoder: decoding.Decoder, batch: int, context: int, steps: int) -> Cache:
    ctx = decoder.model.ctx
    cache = new_cache(ctx.model, batch, context + steps, dtype=ctx.dtype, device=ctx.device)
    for layer in cache.layers.values():
        if isinstance(layer, LatentCache):
            layer.latents.normal_()
    cache.lengths += context
    return cache


def drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(decoder: decoding.Decoder, batch: int, context: int, steps: int) -> Row:
    """Two steps to warm up, then `steps` timed ones, the last of which ends at `context` + steps + 2 tokens."""
    device = decoder.model.ctx.device
    cache = filled_cache(decoder, batch, context, steps + 2)
    tokens = list(torch.ones(batch, 1, dtype=torch.int64, device=device).unbind(0))
    times, kda = [], []
    with TimedKDA(device) as timed:
        for i in range(steps + 2):
            drain(device)
            begin = time.perf_counter()
            decoder.forward(tokens, cache)
            drain(device)
            took, inside = time.perf_counter() - begin, timed.take()
            if i >= 2:
                times.append(took)
                kda.append(inside)
    middle = len(times) // 2
    return Row(context, batch, sorted(times)[middle], sorted(kda)[middle], cache.bytes())


def forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def largest(decoder: decoding.Decoder, context: int, steps: int) -> Row:
    """The row at the largest batch that fits; batch 0 is never returned: one sequence that does not fit raises."""
    ctx = decoder.model.ctx
    model = ctx.model
    forget()
    free = torch.cuda.mem_get_info()[0] if ctx.device.type == "cuda" else CPU_MEMORY
    linear = new_cache(model, 1, 0, dtype=ctx.dtype, device=ctx.device).bytes()
    scores = 14 * model.mla.heads * context  # three fp32 and one bf16 copy of one layer's scores
    width = torch.finfo(ctx.dtype).bits // 8
    each = bytes_per_token(model, width) * (context + steps + 2) + linear + scores
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
    options = parser.parse_args()
    if options.tiny:
        options.model, options.contexts, options.steps = "k3_tiny", "16,64", 2
    elif not torch.cuda.is_available():
        sys.exit("benchmarks/decode.py: needs a CUDA device (or --tiny)")
    contexts = [int(c) for c in options.contexts.split(",")]
    device = start_process()
    from k3train.parallel import layout as layouts

    layout = layouts.initialize(layouts.Sizes())
    hybrid = dataclasses.replace(compose([f"model={options.model}"]).model, backend="auto")
    layers = expand_pattern(hybrid.pattern, hybrid.hybrid)
    every = dataclasses.replace(hybrid, pattern=f"F*{len(layers)}")
    bytes_ratio = len(layers) / layers.count("F")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}; {hybrid.name}: {len(layers)} layers, {layers.count('F')} of them MLA")
    print(f"{'model':16} {'context':>9} {'batch':>6} {'step ms':>9} {'tokens/s':>10} {'KDA ms':>8} {'cache GiB':>10}")
    decoder = build(every, layout, device)
    theirs = sweep(decoder, "MLA everywhere", contexts, [], options.steps)
    del decoder
    forget()
    both = theirs["largest"].batch
    decoder = build(hybrid, layout, device)
    ours = sweep(decoder, "KDA and MLA", contexts, [both] if both > 1 else [], options.steps)

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
