"""Activations computed again in the backward, or kept in host memory or in FP8, instead of kept as they are
(`train.recompute`, and by class of tensor `train.activations`).

full: every layer keeps only the depth state it was given. unit: every four layers do (KKKF). Both may stop at a layer
(`train.recompute_layers`): what the last layers keep has gone when the first are computed again. selective: only the
element-wise parts are computed again: the mixes over depth, norms, gated units and gates, which are a large share of
the activations and almost none of the work. All give the losses and gradients of `none` to the last bit on one device:
the graph stays the same, only what its nodes saved is made again. In FP8 the forward is the same to the last bit and
gradients are rounded: only what backward reads is stored with fewer bits, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from k3kernels import fp8
from k3train.config.activations import CHEAP, regions
from k3train.model.attention_residuals import DepthState, uses_kernels

if TYPE_CHECKING:
    from k3train.model.context import ModelContext, PackedStream
    from k3train.model.layer import K3Layer

OFFLOADED_BYTES = 1 << 20
"""Smaller tensors stay on the device."""

SMALLEST_IN_FP8 = 1 << 20
"""Bytes of a tensor below which it is kept as it is."""


@contextmanager
def offloaded() -> Iterator[None]:
    """What is saved for backward inside goes to pinned host memory and comes back when it is asked for.

    Copies out run on a stream of their own beside the forward; on a CPU they are copies like any other.
    """
    stream = _copy_stream() if torch.cuda.is_available() else None

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.nbytes < OFFLOADED_BYTES and stream is not None:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=stream is not None)
        if stream is None:
            return host.copy_(tensor), tensor.device, None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        return host, tensor.device, stream.record_event()

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        host, device, copied = packed
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)
        return host.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@contextmanager
def in_fp8(elsewhere: tuple[torch.Tensor, ...] = ()) -> Iterator[None]:
    """What is saved for backward inside is kept in E4M3 with one scale for 128 values of a row.

    Left as they are: parameters, what is small, strided or no matrix of floats, and tensors of `elsewhere`, whose memory
    others hold anyway.
    """
    held = {(t.data_ptr(), t.nbytes) for t in elsewhere}

    def pack(tensor: torch.Tensor) -> Any:
        parameter = isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)
        matrix = tensor.dtype in fp8.FLOATS and tensor.dim() > 1 and tensor.shape[-1] >= fp8.BLOCK // 4
        large = tensor.nbytes >= SMALLEST_IN_FP8 and tensor.is_contiguous()
        if parameter or not matrix or not large or (tensor.data_ptr(), tensor.nbytes) in held:
            return tensor
        return (*fp8.quantise(tensor.detach()), tensor.dtype, tensor.shape)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        values, scales, dtype, shape = packed
        return fp8.dequantise(values, scales, dtype).view(shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@functools.cache
def _copy_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@contextmanager
def _again(ctx: ModelContext) -> Iterator[None]:
    """Marks the second pass: nothing is counted or recorded twice."""
    before, ctx.recomputing = ctx.recomputing, True
    try:
        yield
    finally:
        ctx.recomputing = before


def region(
    ctx: ModelContext, function: Callable[..., Any], *tensors: torch.Tensor, offload: bool = False
) -> Any:  # fmt: skip
    """function(*tensors) without its intermediates; parameters may come by closure. offload: `tensors` wait for
    backward in host memory."""
    if not torch.is_grad_enabled():
        return function(*tensors)
    # the second pass runs to its end, so that its collectives are the same on every rank whatever each one saved
    with offloaded() if offload else nullcontext():
        return checkpoint(
            function, *tensors, use_reentrant=False, preserve_rng_state=False, early_stop=False,
            context_fn=lambda: (nullcontext(), _again(ctx)),
        )  # fmt: skip


def policy(ctx: ModelContext, kind: str) -> str:
    """What is done with tensors of this class (`config.activations`)."""
    return ctx.activations.get(kind) or ("recompute" if kind in CHEAP and ctx.recompute == "selective" else "keep")


def elementwise(
    ctx: ModelContext, kind: str, function: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> torch.Tensor:
    """function(*tensors), a cheap function of large tensors, of a class that the policies may compute again."""
    return region(ctx, function, *tensors) if policy(ctx, kind) == "recompute" else function(*tensors)


def consumed(
    ctx: ModelContext, kind: str, function: Callable[..., torch.Tensor], *tensors: torch.Tensor,
    by: Callable[[torch.Tensor], torch.Tensor], fused: bool = False, elsewhere: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:  # fmt: skip
    """by(function(*tensors)): `elementwise` whose result is read by one product alone.

    Computed again, neither function's intermediates nor its result are kept: the result's memory is given back once
    `by` has read it, and filled again when the gradient of what `by` made arrives, before `by` walks back. fused: the
    function is one kernel that keeps nothing but its inputs. In FP8, all that both keep is, but for tensors that others
    hold elsewhere.
    """
    return consumed_later(ctx, kind, function, *tensors, by=by, fused=fused, elsewhere=elsewhere)()


def consumed_later(
    ctx: ModelContext, kind: str, function: Callable[..., torch.Tensor], *tensors: torch.Tensor,
    by: Callable[[torch.Tensor], torch.Tensor], fused: bool = False, elsewhere: tuple[torch.Tensor, ...] = (),
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """`consumed` in two halves: the function is computed now, and `by` when what is returned is called, once."""
    if policy(ctx, kind) == "fp8" and torch.is_grad_enabled():
        with in_fp8(elsewhere):
            low = function(*tensors)

        def read() -> torch.Tensor:
            with in_fp8(elsewhere):
                return by(low)

        return read
    if policy(ctx, kind) != "recompute" or not torch.is_grad_enabled():
        now = function(*tensors)
        return lambda: by(now)
    result = function(*tensors) if fused else region(ctx, function, *tensors)
    storage = result.untyped_storage()
    size = storage.size()

    def fill(_grad: torch.Tensor) -> None:
        with torch.no_grad(), _again(ctx):
            again = function(*(t.detach() for t in tensors))
        storage.resize_(size)
        storage.copy_(again.untyped_storage())

    def finish() -> torch.Tensor:
        out = by(result)
        if result.requires_grad and out.requires_grad:
            storage.resize_(0)
            out.register_hook(fill)
        return out

    return finish


def run_layers(ctx: ModelContext, layers: list[K3Layer], state: DepthState, stream: PackedStream) -> DepthState:
    """The layers in order, in regions of one (full) or of a unit where they are computed again."""
    of_one = {layer.index: layer for layer in layers}
    for again, indices in regions(ctx.recompute, ctx.recompute_layers, list(of_one)):
        state = _layers_region(ctx, [of_one[i] for i in indices], state, stream, recompute=again)
    return state


def _layers_region(
    ctx: ModelContext, layers: list[K3Layer], state: DepthState, stream: PackedStream, *, recompute: bool
) -> DepthState:
    block = state.block

    def forward(*sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal block
        inner = DepthState(list(sources[:-1]), sources[-1], state.block)
        for layer in layers:
            inner = layer(inner, stream)
        assert inner.partial is not None
        if not ctx.recomputing:
            block = inner.block
        return (*inner.bank, inner.partial)

    assert state.partial is not None
    if state.bank and uses_kernels(state.bank[0]) and not layers[0].begins_block:
        state.opened(ctx.model.norm_eps, layers[0].mixes)  # outside of the region: its gradients are of later ones too
    sources = (*state.bank, state.partial)
    offload = policy(ctx, "layer_inputs") == "offload"
    out = region(ctx, forward, *sources, offload=offload) if recompute else forward(*sources)
    return DepthState(list(out[:-1]), out[-1], block)
