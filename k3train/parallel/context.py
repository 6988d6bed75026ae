"""Context parallelism: contiguous slices of the stream, a state scan for KDA, gathered latents for MLA.

Rank r of P holds tokens [r T/P, (r+1) T/P) of a packed stream whose documents may begin and end anywhere. Everything
token-wise needs nothing else. A KDA layer needs the last inputs of its short convolution and the state its first
document enters with (report section 5.1, equation 17); an attention layer needs the latents of the tokens before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from k3kernels.conv import short_convolution
from k3kernels.kda import first_document_state, fold_segments, kda_segment
from k3train.parallel.exchange import gather_first, gather_rows, swap_halves
from k3train.parallel.slices import QueryBlock, Slice, cut, swapped_blocks

if TYPE_CHECKING:
    from k3train.model.backend import Backend
    from k3train.model.context import ModelContext, PackedStream
    from k3train.model.kda import KDA

Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Watch = Callable[[torch.Tensor, torch.Tensor], None]


def _bounds(stream: PackedStream) -> list[int]:
    """Document borders on the host, read once a micro-batch."""
    if "bounds" not in stream.cache:
        stream.cache["bounds"] = stream.cu_seqlens.tolist()
    return stream.cache["bounds"]  # type: ignore[return-value]


def local_slice(stream: PackedStream, group: dist.ProcessGroup) -> tuple[Slice, torch.Tensor]:
    """This rank's slice and its piece borders int32 [pieces + 1] on the stream's device, made once a micro-batch."""
    if "context_slice" not in stream.cache:
        part = cut(_bounds(stream), group.size(), group.rank())
        borders = torch.tensor(part.pieces, dtype=torch.int32, device=stream.cu_seqlens.device)
        stream.cache["context_slice"] = part, borders
    return stream.cache["context_slice"]  # type: ignore[return-value]


# -- KDA ------------------------------------------------------------------------------------------------------------


def kda_attention(
    layer: KDA, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor,
    stream: PackedStream,
) -> torch.Tensor:  # fmt: skip
    """Projected q, k, v [T/P, H * K], raw gate z and logits beta [T/P, H] of this rank -> o [T/P, H, V].

    Exchanges one tail of conv inputs and one (M, S) pair a rank, and nothing when no document crosses a rank border.
    """
    group = layer.ctx.layout.cp
    part, borders = local_slice(stream, group)
    weights = (layer.q_conv, layer.k_conv, layer.v_conv)
    q, k, v = convolve((q, k, v), weights, part, borders, group)
    state = entering_state(layer, k, v, z, beta, part, group) if part.crossed else None
    initial = None if state is None else first_document_state(state, len(part.pieces) - 1)
    out, _ = layer.recurrence(q, k, v, z, beta, cu_seqlens=borders, initial_state=initial)
    return out


def convolve(
    inputs: tuple[torch.Tensor, ...], weights: tuple[torch.Tensor, ...], part: Slice, borders: torch.Tensor,
    group: dist.ProcessGroup,
) -> list[torch.Tensor]:  # fmt: skip
    """Short convolutions [T/P, C_i] with C_i x W weights that see the inputs of the ranks before, in one exchange."""
    before = weights[0].shape[1] - 1
    states: list[torch.Tensor | None] = [None] * len(inputs)
    if part.crossed and before:
        tails = gather_rows(torch.cat([x[-before:] for x in inputs], dim=-1), group)
        places = torch.tensor(part.history(before), device=tails.device)
        # ranks without history read a row too and drop it, so that all of them meet in the backward
        rows = tails[places.clamp(min=0)].masked_fill((places < 0)[:, None], 0)
        others = len(part.pieces) - 2
        states = [
            torch.nn.functional.pad(rest.mT[None], (0, 0, 0, 0, 0, others))
            for rest in rows.split([x.shape[-1] for x in inputs], dim=-1)
        ]
    return [
        short_convolution(x[None], w, cu_seqlens=borders, initial_state=s)[0][0]
        for x, w, s in zip(inputs, weights, states)
    ]


def entering_state(
    layer: KDA, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, part: Slice,
    group: dist.ProcessGroup,
) -> torch.Tensor:  # fmt: skip
    """The state fp32 [H, K, V] in which this slice's first document enters: zero when it begins here."""
    heads, width = layer.heads, layer.head_dim
    if part.leaves:
        begin = part.pieces[-2]
        # a document that began here does not depend on what entered: [0, begin, length] says so even for begin = 0
        whole = begin == 0 and part.continues
        borders = None if whole else torch.tensor([0, begin, part.length], dtype=torch.int32)

        def summary(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return kda_segment(*tensors, bound=layer.ctx.model.kda.decay_bound, cu_seqlens=borders)

        # recomputed in the backward: its intermediates are as large as the layer's own
        per_head = (x.view(1, -1, heads, width) for x in (k, v, z))
        M, S = checkpoint(
            summary, *per_head, beta.view(1, -1, heads), layer.A_log, layer.dt_bias,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
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


def latent_attention(
    ctx: ModelContext, q: torch.Tensor, latent: torch.Tensor, expand: Expand, stream: PackedStream, scale: float,
    watch: Watch | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention inside documents over the whole stream: q [T/P, H, K], latent [T/P, C] -> [T/P, H, V].

    watch: is shown queries and keys of every piece, once.

    The latents travel, not the keys they expand to. Since contiguous slices would leave the first ranks idle under the
    causal mask, ranks trade half of their query rows with their mirror and trade the results back.
    """
    group = ctx.layout.cp
    if "query_blocks" not in stream.cache:
        stream.cache["query_blocks"] = swapped_blocks(_bounds(stream), group.size(), group.rank())
    blocks: list[QueryBlock] = stream.cache["query_blocks"]  # type: ignore[assignment]

    shown = [watch]  # taken by the first pass: the backward runs the core again

    def core(q: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        once = shown.pop() if shown else None
        return attend_blocks(ctx.backend, q, gather_rows(latent, group), expand, blocks, scale, once)

    # keys and values of the whole stream exist only while the core runs; the backward gathers and expands them again
    out = checkpoint(core, swap_halves(q, group), latent, use_reentrant=False, preserve_rng_state=False)
    return swap_halves(out, group)


def attend_blocks(
    backend: Backend, q: torch.Tensor, latents: torch.Tensor, expand: Expand, blocks: list[QueryBlock], scale: float,
    watch: Watch | None = None,
) -> torch.Tensor:  # fmt: skip
    """q [rows, H, K] of the blocks end to end, latents [T, C] of the whole stream -> [rows, H, V]."""
    needed = merge([(b.first_key, b.last) for b in blocks])
    k, v = expand(torch.cat([latents[a:b] for a, b in needed]) if len(needed) > 1 else latents[slice(*needed[0])])
    outputs, row = [], 0
    for block in blocks:
        base, before = 0, 0
        for a, b in needed:  # where the block's keys lie among the expanded ones
            if a <= block.first_key < b:
                base = before - a
            before += b - a
        for first, last, first_key in block.pieces:
            rows = q[row : row + last - first]
            keys = slice(base + first_key, base + last)
            if watch is not None:
                watch(rows, k[keys])
            outputs.append(causal_core(backend, rows, k[keys], v[keys], scale))
            row += last - first
    return torch.cat(outputs)


def merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted disjoint ranges that cover the same positions."""
    merged: list[tuple[int, int]] = []
    for a, b in sorted(ranges):
        if merged and a <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], b)
        else:
            merged.append((a, b))
    return merged


def causal_core(backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [n, H, K] are the last n of the m positions of k [m, H, K], v [m, H, V] -> [n, H, V]."""
    return backend.suffix_attention(q, k, v, scale)
