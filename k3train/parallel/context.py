"""Context parallelism: contiguous slices of the stream, a state scan for KDA, gathered latents for MLA.

Rank r of P holds tokens [r T/P, (r+1) T/P) of a packed stream whose documents may begin and end anywhere. Everything
token-wise needs nothing else. A KDA layer needs the last inputs of its short convolution and the state its first
document enters with (report section 5.1, equation 17); an attention layer needs the latents of the tokens before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from k3kernels.conv import short_convolution_qkv
from k3kernels.kda import first_document_state, fold_segments
from k3train.parallel import context_on_device
from k3train.parallel.exchange import gather_first, gather_rows, swap_halves
from k3train.parallel.last_piece import summarize, with_tail
from k3train.parallel.slices import QueryBlock, Slice, cut, own_block, rounded_up, swap_pays, swapped_blocks

if TYPE_CHECKING:
    from k3train.model.backend import Backend
    from k3train.model.context import ModelContext, PackedStream
    from k3train.model.kda import KDA

Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Watch = Callable[..., None]


def _bounds(stream: PackedStream) -> Sequence[int]:
    """Document borders on the host. Reading them from a device waits for it, once a micro-batch."""
    if stream.bounds is None:
        stream.bounds = stream.cu_seqlens.tolist()
    return stream.bounds


def _on_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of the host on the device, without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def local_slice(stream: PackedStream, group: dist.ProcessGroup) -> tuple[Slice, torch.Tensor]:
    """This rank's slice and its piece borders int32 [pieces + 1] on the stream's device, made once a micro-batch."""
    if "context_slice" not in stream.cache:
        part = cut(_bounds(stream), group.size(), group.rank())
        stream.cache["context_slice"] = part, _on_device(part.pieces, torch.int32, stream.cu_seqlens.device)
    return stream.cache["context_slice"]  # type: ignore[return-value]


def history(stream: PackedStream, part: Slice, count: int) -> torch.Tensor:
    """Slice.history int64 [count] on the stream's device, made once a micro-batch."""
    key = f"context_history_{count}"
    if key not in stream.cache:
        stream.cache[key] = _on_device(part.history(count), torch.int64, stream.cu_seqlens.device)
    return stream.cache[key]  # type: ignore[return-value]


# -- KDA ------------------------------------------------------------------------------------------------------------


def kda_attention(
    layer: KDA, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor,
    stream: PackedStream,
) -> torch.Tensor:  # fmt: skip
    """Projected q, k, v [T/P, H * K], raw gate z and logits beta [T/P, H] of this rank -> o [T/P, H, V].

    Exchanges one tail of conv inputs and one (M, S) pair a rank, and nothing when no document crosses a rank border.
    """
    if stream.on_device:
        return context_on_device.kda_attention(layer, q, k, v, z, beta, stream)
    group = layer.ctx.layout.cp
    part, borders = local_slice(stream, group)
    weights = (layer.q_conv, layer.k_conv, layer.v_conv)
    q, k, v = convolve((q, k, v), weights, stream, group)
    initial = None
    if part.crossed:
        last = k, v, z, beta
        if part.leaves:
            (k, v, z, beta), last = zip(*(with_tail(x, part.pieces[-2]) for x in last))
        initial = first_document_state(entering_state(layer, *last, part, group), len(part.pieces) - 1)
    out, _ = layer.recurrence(q, k, v, z, beta, cu_seqlens=borders, initial_state=initial)
    return out


def convolve(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor], stream: PackedStream, group: dist.ProcessGroup,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Short convolutions [T/P, C_i] with C_i x W weights that see the inputs of the ranks before, in one exchange."""
    part, borders = local_slice(stream, group)
    before = weights[0].shape[1] - 1
    states: tuple[torch.Tensor, ...] | None = None
    if part.crossed and before:
        inputs, ends = zip(*(with_tail(x, max(0, x.shape[0] - before)) for x in inputs))  # type: ignore[assignment]
        tails = gather_rows(torch.cat(ends, dim=-1), group)
        places = history(stream, part, before)
        # ranks without history read a row too and drop it, so that all of them meet in the backward
        rows = tails[places.clamp(min=0)].masked_fill((places < 0)[:, None], 0)
        others = len(part.pieces) - 2
        states = tuple(
            torch.nn.functional.pad(rest.mT[None], (0, 0, 0, 0, 0, others))
            for rest in rows.split([x.shape[-1] for x in inputs], dim=-1)
        )
    q, k, v = inputs
    *out, _ = short_convolution_qkv(
        q[None], k[None], v[None], *weights, cu_seqlens=borders, initial_states=states  # type: ignore[arg-type]
    )  # fmt: skip
    return tuple(x.squeeze(0) for x in out)  # not x[0], whose gradient is copied into one of zeros


def entering_state(
    layer: KDA, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, part: Slice,
    group: dist.ProcessGroup,
) -> torch.Tensor:  # fmt: skip
    """The state fp32 [H, K, V] in which this slice's first document enters: zero when it begins here.

    k, v, z [n, H * K] and beta [n, H] are of the slice's last piece, if its document goes on on the next rank.
    """
    heads, width = layer.heads, layer.head_dim
    if part.leaves:
        tokens = k.shape[0]
        # a document that began here does not depend on what entered: an empty piece before it says so
        passes = tokens == part.length and part.continues
        borders = None if passes else torch.tensor([0, 0, tokens], dtype=torch.int32)
        # The intermediates of a long piece are as large as the layer's own, and made again in the backward, unless the
        # whole layer is. Those of a short one are worth less than a second pass over it.
        again = tokens > part.length // 4 and not layer.ctx.computed_again(layer.layer)
        M, S = summarize(layer, k, v, z, beta, again=again, cu_seqlens=borders)
    else:  # nobody will read it
        dtype = torch.promote_types(k.dtype, torch.float32)
        M, S = (torch.zeros(heads, width, width, dtype=dtype, device=k.device) for _ in range(2))
    return _StateScan.apply(M, S, k, part, group)


class _StateScan(torch.autograd.Function):
    """Prefix fold S <- M_j S + S_j over the ranks before that hold the same document, and its mirror.

    M, S [H, K, K], [H, K, V] of this rank; `anchor` is any tensor with a gradient, so that every rank has a backward.
    Backward: with D_j the gradient of the state that leaves rank j, D_{j-1} = M_j^T D_j + dS_j (dS_j that of the state
    entering rank j's own kernel), folded from the document's last rank down. M travels again rather than being kept.
    """

    @staticmethod
    def forward(
        ctx: Any, M: torch.Tensor, S: torch.Tensor, anchor: torch.Tensor, part: Slice, group: dist.ProcessGroup
    ) -> torch.Tensor:
        pairs = gather_first(torch.cat([M, S], dim=-1)[None], group)[part.first_source : part.rank]
        state = fold_segments(pairs[..., : M.shape[-1]], pairs[..., M.shape[-1] :])
        ctx.part, ctx.group = part, group
        ctx.save_for_backward(M, state)
        return state

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        M, state = ctx.saved_tensors
        part: Slice = ctx.part
        grad = grad.to(M.dtype) if part.continues else torch.zeros_like(state)
        pairs = gather_first(torch.cat([M, grad], dim=-1)[None], ctx.group)
        pairs = pairs[part.rank + 1 : part.last_reader + 1].flip(0)
        leaving = fold_segments(pairs[..., : M.shape[-1]].mT, pairs[..., M.shape[-1] :])
        return leaving @ state.mT, leaving, None, None, None


# -- attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """A block of query rows whose pieces' borders are on the device: int32 [pieces + 1] among the queries and among the
    keys, both from 0, with empty pieces at the end (kernels are planned for each number of pieces)."""

    block: QueryBlock
    queries: torch.Tensor
    keys: torch.Tensor


def query_rows(stream: PackedStream, group: dist.ProcessGroup) -> tuple[list[Rows], bool]:
    """The blocks that this rank attends for, made once a micro-batch, and whether half of their rows are another rank's."""
    if "query_rows" not in stream.cache:
        device, found, bounds = stream.cu_seqlens.device, [], _bounds(stream)
        size, rank = group.size(), group.rank()
        swapped = swap_pays(bounds, size)
        for block in swapped_blocks(bounds, size, rank) if swapped else [own_block(bounds, size, rank)]:
            more = rounded_up(len(block.pieces), 8) - len(block.pieces)
            ends = [(last - block.first, last - block.first_key) for _, last, _ in block.pieces]
            queries, keys = zip((0, 0), *ends, *[ends[-1]] * more)
            found.append(Rows(block, _on_device(queries, torch.int32, device), _on_device(keys, torch.int32, device)))
        stream.cache["query_rows"] = found, swapped
    return stream.cache["query_rows"]  # type: ignore[return-value]


def latent_attention(
    ctx: ModelContext, q: torch.Tensor, latent: torch.Tensor, expand: Expand, stream: PackedStream, scale: float,
    watch: Watch | None = None, *, again: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Causal attention inside documents over the whole stream: q [T/P, H, K], latent [T/P, C] -> [T/P, H, V].

    watch: is shown queries and keys of every piece, once; with `on_device` of every block, with the keys' documents.
    again: the backward computes the whole layer again.

    The latents travel, not the keys they expand to. Long documents would leave the first ranks idle under the causal mask:
    then ranks trade half of their query rows with their mirror and trade the results back (`swap_pays`).
    """
    if stream.on_device:
        return context_on_device.latent_attention(ctx, q, latent, expand, stream, scale, watch, again=again)
    group = ctx.layout.cp
    blocks, swapped = query_rows(stream, group)
    shown = [watch]  # taken by the first pass: the backward runs the core again

    def core(q: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        once = shown.pop() if shown else None
        return attend_blocks(ctx.backend, q, gather_rows(latent, group), expand, blocks, scale, once)

    rows = swap_halves(q, group) if swapped else q
    if again:  # as part of the whole layer, which keeps nothing before
        out = core(rows, latent)
    else:
        # keys and values of the whole stream exist only while the core runs: the backward gathers and expands them again
        out = checkpoint(core, rows, latent, use_reentrant=False, preserve_rng_state=False)
    return swap_halves(out, group) if swapped else out


def attend_blocks(
    backend: Backend, q: torch.Tensor, latents: torch.Tensor, expand: Expand, blocks: list[Rows], scale: float,
    watch: Watch | None = None,
) -> torch.Tensor:  # fmt: skip
    """q [rows, H, K] of the blocks end to end, latents [T, C] of the whole stream -> [rows, H, V]."""
    needed = merge([(b.block.first_key, b.block.last) for b in blocks])
    k, v = expand(torch.cat([latents[a:b] for a, b in needed]) if len(needed) > 1 else latents[slice(*needed[0])])
    parts = []
    for rows, part in zip(blocks, q.split([b.block.last - b.block.first for b in blocks])):
        block, base, before = rows.block, 0, 0
        for a, b in needed:  # where the block's keys lie among the expanded ones
            if a <= block.first_key < b:
                base = before - a
            before += b - a
        # the documents of a block follow each other, and so do their keys
        keys, values = (x[base + block.first_key : base + block.last] for x in (k, v))
        lengths = [(last - first, last - first_key) for first, last, first_key in block.pieces]
        if watch is not None:
            for queries, known in split_pieces(part, keys, lengths):
                watch(queries, known)
        parts.append(backend.suffixes_attention(part, keys, values, rows.queries, rows.keys, lengths, scale))
    return torch.cat(parts)


def split_pieces(
    q: torch.Tensor, k: torch.Tensor, lengths: Sequence[tuple[int, int]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Queries and keys of each piece."""
    queries, keys = (list(part) for part in zip(*lengths))
    return list(zip(q.split(queries), k.split(keys)))


def merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted disjoint ranges that cover the same positions."""
    merged: list[tuple[int, int]] = []
    for a, b in sorted(ranges):
        if merged and a <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], b)
        else:
            merged.append((a, b))
    return merged
