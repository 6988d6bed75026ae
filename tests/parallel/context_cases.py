"""What the ranks run: KDA and attention layers on slices of a stream, against the same layers on the whole stream."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from k3train.engine.graphs import pad_documents
from k3train.model.backend.local import Backend
from k3train.model.build import make_context
from k3train.model.context import ModelContext, PackedStream
from k3train.model.gated_mla import GatedMLA
from k3train.model.kda import KDA
from k3train.model.parameters import ParameterSpec, draw, initialize_parameters
from k3train.parallel import context, last_piece, slices
from k3train.parallel import layout as layouts
from tests.parallel.tiny import tiny_model


def contexts(bound: float | None = -5.0, dtype: torch.dtype = torch.float32) -> tuple[ModelContext, ModelContext]:
    """The context of this rank and the same one without context parallelism."""
    world = dist.get_world_size()
    layout = layouts.initialize(layouts.Sizes(world=world, context=world), timeout_minutes=1)
    model = tiny_model()
    model.kda.decay_bound = bound
    ctx = make_context(model, layout, dtype, torch.device("cpu"))
    whole = copy.copy(layout)
    whole.sizes = dataclasses.replace(layout.sizes, context=1)
    return ctx, dataclasses.replace(ctx, layout=whole)


@torch.no_grad()
def initialized(module: torch.nn.Module, ctx: ModelContext) -> torch.nn.Module:
    """Values far from the symmetric start: the decays differ, norms and biases act."""
    initialize_parameters(module, ctx.layout, seed=3)
    for name, p in module.named_parameters():
        spec = p.k3
        noise = draw(f"noise.{name}", ParameterSpec(spec.shape, std=0.3), 4, p.device)
        p.copy_(noise + (1.0 if spec.init == "ones" else 0.0) if spec.init != "conv" else p + noise)
    return module


def run(module: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, stream: PackedStream) -> dict[str, Any]:
    """Output, input gradient and every parameter's gradient of sum(weight * y)."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x, stream)
    (y * weight).sum().backward()
    return {"y": y.detach(), "x": x.grad} | {n: p.grad.clone() for n, p in module.named_parameters()}


@contextmanager
def trading(row_pairs: int) -> Iterator[None]:
    """Half of the query rows goes to another rank where that saves its attention this many pairs a row."""
    before, slices.ROW_PAIRS = slices.ROW_PAIRS, row_pairs
    try:
        yield
    finally:
        slices.ROW_PAIRS = before


def deviations(
    kind: str, streams: dict[str, list[list[int]]], bound: float | None = -5.0, on_device: bool = False,
    row_pairs: int = 0, bounded: bool = False,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Largest relative L2 deviation from the whole stream, by name of the streams and by tensor (ranks pooled).

    on_device: as a captured step does it: documents looked up on the device, and padded by empty ones; bounded: with bounds
    on them.
    row_pairs: as for `trading`.

    KDA runs in fp64; attention in fp32, since its norms compute in fp32 whatever they are given.
    """
    dtype = torch.float64 if kind == "kda" else torch.float32
    ctx, ctx_whole = contexts(bound, dtype)
    make = KDA if kind == "kda" else GatedMLA
    local, whole = (initialized(make(c, 0), c).to(dtype) for c in (ctx, ctx_whole))
    worst: dict[str, dict[str, float]] = {}
    for number, (name, bounds) in enumerate((n, b) for n, several in streams.items() for b in several):
        total = bounds[-1]
        length = total // ctx.layout.cp.size()
        mine = slice(ctx.layout.cp.rank() * length, (ctx.layout.cp.rank() + 1) * length)
        generator = torch.Generator().manual_seed(number)
        shape = total, ctx.model.hidden_size
        x, weight = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
        cu = torch.tensor(bounds, dtype=torch.int32)
        want = run(whole, x, weight, PackedStream(cu, total))
        padded = pad_documents(cu) if on_device else cu
        with trading(row_pairs):
            known = slices.spans(bounds, ctx.layout.cp.size()) if bounded else None
            stream = PackedStream(padded, total, on_device=on_device, spans=known)
            got = run(local, x[mine], weight[mine], stream)
        errors = worst.setdefault(name, {})
        for key, value in got.items():
            if key in ("y", "x"):
                pieces = [torch.empty_like(value) for _ in range(ctx.layout.cp.size())]
                dist.all_gather(pieces, value.contiguous())
                value = torch.cat(pieces)
            else:
                dist.all_reduce(value)
            error = float((value - want[key]).norm() / want[key].norm().clamp_min(1e-3))
            errors[key] = max(errors.get(key, 0.0), error)
    return worst


def count_exchanges(bounds: list[int]) -> dict[str, list[tuple[int, ...]]]:
    """Shapes that this rank hands to all-gathers in one forward of each layer, and to those in its backward."""
    ctx, _ = contexts()
    seen: list[tuple[int, ...]] = []
    real = dist.all_gather_into_tensor

    def counted(output: torch.Tensor, tensor: torch.Tensor, **options: Any) -> Any:
        seen.append(tuple(tensor.shape))
        return real(output, tensor, **options)

    found = {}
    dist.all_gather_into_tensor = counted
    try:
        for kind, make in (("kda", KDA), ("mla", GatedMLA)):
            module = initialized(make(ctx, 0), ctx)
            x = torch.randn(bounds[-1] // ctx.layout.cp.size(), ctx.model.hidden_size, requires_grad=True)
            y = module(x, PackedStream(torch.tensor(bounds, dtype=torch.int32), bounds[-1]))
            found[kind], seen = seen, []
            y.sum().backward()
            found[f"{kind} backward"], seen = seen, []
    finally:
        dist.all_gather_into_tensor = real
    return found


def attention_work(bounds: list[int], row_pairs: int = 0) -> tuple[int, int]:
    """Query-key pairs this rank's attention core worked on, and the largest saved tensor in elements."""
    ctx, _ = contexts()
    module = initialized(GatedMLA(ctx, 0), ctx)
    pairs, largest = 0, 0
    real = Backend.suffix_attention

    def counted(backend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        nonlocal pairs
        rows, keys = q.shape[0], k.shape[0]
        pairs += rows * (keys - rows) + rows * (rows + 1) // 2
        return real(backend, q, k, v, scale)

    def saved(t: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        if not isinstance(t, torch.nn.Parameter):
            largest = max(largest, t.numel())
        return t

    Backend.suffix_attention = counted
    try:
        x = torch.randn(bounds[-1] // ctx.layout.cp.size(), ctx.model.hidden_size, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(saved, lambda t: t), trading(row_pairs):
            module(x, PackedStream(torch.tensor(bounds, dtype=torch.int32), bounds[-1]))
    finally:
        Backend.suffix_attention = real
    return pairs, largest


class WholeSlice(TorchDispatchMode):
    """Counts the operations, by name, that make or write tensors with one row for each token of a slice."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.found = length, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.found[func.overloadpacket.__name__] += self.length in out.shape[:2]
        return out


def kda_backward(
    bounds: list[int], recompute: str = "none", recompute_layers: int | None = None
) -> tuple[dict[str, int], int]:
    """What the backward of layer 4's `kda_attention` does to whole slices, and how many summaries this rank computed."""
    ctx, _ = contexts()
    ctx.recompute, ctx.recompute_layers = recompute, recompute_layers
    layer = initialized(KDA(ctx, 4), ctx)
    length = bounds[-1] // ctx.layout.cp.size()
    widths = [layer.heads * layer.head_dim] * 4 + [layer.heads]  # q, k, v, z and beta
    projected = [torch.randn(length, width, requires_grad=True) * 1 for width in widths]
    summaries, real = 0, last_piece.kda_segment

    def counted(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal summaries
        summaries += 1
        return real(*tensors, **options)

    last_piece.kda_segment = counted
    try:
        out = context.kda_attention(
            layer, *projected, PackedStream(torch.tensor(bounds, dtype=torch.int32), bounds[-1])
        )
        with WholeSlice(length) as work:
            out.backward(torch.randn(out.shape))
    finally:
        last_piece.kda_segment = real
    return +work.found, summaries


def without_gradients(bounds: list[int]) -> float:
    """Deviation of the output under no_grad from the one with gradients."""
    ctx, _ = contexts()
    worst = 0.0
    for make in (KDA, GatedMLA):
        module = initialized(make(ctx, 0), ctx)
        x = torch.randn(bounds[-1] // ctx.layout.cp.size(), ctx.model.hidden_size)
        stream = PackedStream(torch.tensor(bounds, dtype=torch.int32), bounds[-1])
        with torch.no_grad():
            y = module(x, stream)
        worst = max(worst, float((module(x, stream) - y).abs().max()))
    return worst
