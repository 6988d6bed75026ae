"""Context parallelism for captured steps: shapes follow from the sizes and from bounds on documents (`slices.Spans`), and
documents are looked up on the device.

The maths is that of `context.py`, where the host knows the documents and leaves out what they do not need. Here all ranks
do the same in every layer, and masks take the part that documents do not ask for: each gathers the tails of the
convolutions, sums its last piece up as (M, S), and folds the pairs of all ranks before it. A document border anywhere
cuts the fold by M = 0, since then no state goes through the slice; that a rank's first token begins a document is the
only other thing to know.

Where documents reach but a little over the borders between ranks (`Spans.border` less than a slice), that many tokens at
its end hold a slice's last piece, M = 0 everywhere, and attention needs that many latents of the rank before. Else the
last piece may be the whole slice, every rank gathers all latents, and ranks trade half of their query rows.

Nothing here reads a value on the host, and no number of the host is copied to the device: a replay would copy from
memory that is long in other use. (An index that is a tensor of no dimensions would be read; these have one.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from k3kernels.conv import short_convolution_qkv
from k3kernels.kda import fold_segments
from k3kernels.live_rows import live_rows
from k3train.errors import LayoutError
from k3train.parallel.exchange import gather_first, gather_rows, swap_halves
from k3train.parallel.last_piece import last_state, summarize, with_tail
from k3train.parallel.slices import swapped_ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from k3train.model.backend import Backend
    from k3train.model.context import ModelContext, PackedStream
    from k3train.model.kda import KDA

    Expand = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    Watch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class DeviceSlice:
    """Tokens [rank * length, (rank + 1) * length) of the stream; all tensors are on its device, and those of one number
    have the shape [1].

    pieces: int32 [N + 1], borders of the documents inside, counted from the slice's start: empty pieces at both ends stand
    for the documents elsewhere.
    first: int64, the piece that holds the first token; document_start: int32, where its document begins in the stream.
    continues: bool, it began on a rank before.
    last_begin: int32, where the piece that holds the last token begins, counted from the slice's start.
    passes: bool, that piece is the whole slice and its document began before: what enters here goes out again.
    """

    rank: int
    length: int
    pieces: torch.Tensor
    first: torch.Tensor
    document_start: torch.Tensor
    continues: torch.Tensor
    last_begin: torch.Tensor
    passes: torch.Tensor


def document_at(cu_seqlens: torch.Tensor, position: int) -> torch.Tensor:
    """int64 [1]: which document holds the token at `position`; empty ones hold none."""
    return (cu_seqlens[1:] <= position).sum(0, keepdim=True)


def device_slice(stream: PackedStream, group: dist.ProcessGroup) -> DeviceSlice:
    """This rank's slice, made once a micro-batch."""
    if "device_slice" not in stream.cache:
        cu, size, rank = stream.cu_seqlens, group.size(), group.rank()
        if stream.total == 0 or stream.total % size:
            raise LayoutError(
                f"a stream of {stream.total} tokens does not divide over parallel.context={size} ranks; "
                f"make train.seq_length * train.micro_batch a multiple of {size}"
            )
        length = stream.total // size
        start = rank * length
        pieces = (cu - start).clamp(0, length).to(torch.int32)
        first, last = document_at(cu, start), document_at(cu, start + length - 1)
        document_start = cu.index_select(0, first)
        stream.cache["device_slice"] = DeviceSlice(
            rank=rank, length=length, pieces=pieces, first=first, document_start=document_start,
            continues=document_start < start, last_begin=pieces.index_select(0, last),
            passes=cu.index_select(0, last) < start,
        )  # fmt: skip
    return stream.cache["device_slice"]  # type: ignore[return-value]


def border_of(stream: PackedStream, group: dist.ProcessGroup) -> int:
    """Tokens on either side of a border between ranks that hold what a document has there; a whole slice: no bound."""
    length = stream.total // group.size()
    return length if stream.spans is None else min(stream.spans.border, length)


# -- KDA ------------------------------------------------------------------------------------------------------------


def kda_attention(
    layer: KDA, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor,
    stream: PackedStream,
) -> torch.Tensor:  # fmt: skip
    """`context.kda_attention`: projected q, k, v [T/P, H * K], raw gate z and logits beta [T/P, H] -> o [T/P, H, V]."""
    group = layer.ctx.layout.cp
    part, border = device_slice(stream, group), border_of(stream, group)
    q, k, v = convolve((q, k, v), (layer.q_conv, layer.k_conv, layer.v_conv), part, group)
    last = k, v, z, beta
    if border < part.length:
        (k, v, z, beta), last = zip(*(with_tail(x, part.length - border) for x in last))
    initial = at_first_piece(entering_state(layer, *last, part, group), part)
    out, _ = layer.recurrence(q, k, v, z, beta, cu_seqlens=part.pieces, initial_state=initial)
    return out


def at_first_piece(state: torch.Tensor, part: DeviceSlice) -> torch.Tensor:
    """[N, ...]: the state [...] for the piece with the first token, zero for all others."""
    documents = part.pieces.shape[0] - 1
    return state.new_zeros(documents, *state.shape).index_copy(0, part.first, state[None])


def convolve(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor], part: DeviceSlice, group: dist.ProcessGroup,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Short convolutions [T/P, C_i] with C_i x W weights that see the inputs of the ranks before, in one exchange."""
    before = weights[0].shape[1] - 1
    states: tuple[torch.Tensor, ...] | None = None
    if before:
        inputs, ends = zip(*(with_tail(x, max(0, x.shape[0] - before)) for x in inputs))  # type: ignore[assignment]
        tails = gather_rows(torch.cat(ends, dim=-1), group)
        # The last inputs of all ranks end to end: those before this slice end where its own begin, also where slices are
        # shorter than what a convolution sees. The zeros in front are the first rank's, which meets in the backward too.
        padded = torch.nn.functional.pad(tails, (0, 0, before, 0))
        rows = padded.narrow(0, part.rank * min(before, part.length), before)
        positions = torch.arange(before, device=rows.device) + (part.rank * part.length - before)
        rows = rows.masked_fill((positions < part.document_start)[:, None], 0)
        states = tuple(at_first_piece(x.mT, part) for x in rows.split([x.shape[-1] for x in inputs], dim=-1))
    q, k, v = inputs
    *out, _ = short_convolution_qkv(
        q[None], k[None], v[None], *weights, cu_seqlens=part.pieces, initial_states=states  # type: ignore[arg-type]
    )  # fmt: skip
    return tuple(x.squeeze(0) for x in out)  # not x[0], whose gradient is copied into one of zeros


def entering_state(
    layer: KDA, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, part: DeviceSlice,
    group: dist.ProcessGroup,
) -> torch.Tensor:  # fmt: skip
    """The state fp32 [H, K, V] in which this slice's first document enters: zero when it begins here.

    k, v, z [n, H * K] and beta [n, H] are of the slice's last n tokens: all, or as many as hold a last piece that goes on.
    """
    tokens = k.shape[0]
    # as where the host knows the documents: what a short piece leaves for the backward is not worth a second pass
    again = tokens > part.length // 4 and not layer.ctx.computed_again(layer.layer)
    if tokens < part.length:
        # a longer last piece ends with its document here: nobody asks for its state
        begin = (part.last_begin - (part.length - tokens)).clamp(min=0)
        S = last_state(layer, k, v, z, beta, begin, again=again)
        M = S.new_zeros(*S.shape[:-1], S.shape[-2])
    else:
        M, S = summarize(layer, k, v, z, beta, again=again, start=part.last_begin)
        M = M.masked_fill(~part.passes, 0)
    return _FullScan.apply(M, S, part.continues, group)


class _FullScan(torch.autograd.Function):
    """Fold S <- M_j S + S_j over all ranks before, and its mirror over all ranks behind.

    M, S [H, K, K], [H, K, V] of this rank, M = 0 where a document begins in the slice; continues: bool [1]. A rank where
    no document continues hands no gradient down, and its M is zero, so that the mirror is cut where the fold is.
    """

    @staticmethod
    def forward(
        ctx: Any, M: torch.Tensor, S: torch.Tensor, continues: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        pairs = gather_first(torch.cat([M, S], dim=-1)[None], group)[: group.rank()]
        state = fold_segments(pairs[..., : M.shape[-1]], pairs[..., M.shape[-1] :]).masked_fill(~continues, 0)
        ctx.group = group
        ctx.save_for_backward(M, state, continues)
        return state

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        M, state, continues = ctx.saved_tensors
        grad = grad.to(M.dtype).masked_fill(~continues, 0)
        pairs = gather_first(torch.cat([M, grad], dim=-1)[None], ctx.group)[ctx.group.rank() + 1 :].flip(0)
        leaving = fold_segments(pairs[..., : M.shape[-1]].mT, pairs[..., M.shape[-1] :])
        return leaving @ state.mT, leaving, None, None


# -- attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceRows:
    """Query rows [first, last) of the stream, and int32 [N + 1] borders of the documents' queries among them and of their
    keys in the stream, counted from row `base`; first_key int32 [1] is where the first row's document begins, likewise."""

    first: int
    last: int
    base: int
    queries: torch.Tensor
    keys: torch.Tensor
    first_key: torch.Tensor


def query_rows(stream: PackedStream, group: dist.ProcessGroup) -> list[DeviceRows]:
    """The blocks that this rank attends for, made once a micro-batch: its own rows, or those of `swapped_ranges`.

    Documents that ended before a block have neither queries nor keys in it, like those that begin after it: the keys begin
    at `first_key` rather than at `base`.
    """
    if "device_rows" not in stream.cache:
        size, rank, border = group.size(), group.rank(), border_of(stream, group)
        length = stream.total // size
        ranges, base = swapped_ranges(stream.total, size, rank), 0
        if border < length:
            ranges, base = [(rank * length, (rank + 1) * length)], rank * length - (border if rank else 0)
        cu, found = stream.cu_seqlens.to(torch.int32), []
        for a, b in ranges:
            first_key = cu.index_select(0, document_at(cu, a))
            keys = torch.maximum(cu, first_key).clamp(max=b)
            found.append(DeviceRows(a, b, base, (cu - a).clamp(0, b - a), keys - base, first_key - base))
        stream.cache["device_rows"] = found
    return stream.cache["device_rows"]  # type: ignore[return-value]


def behind_the_rank_before(x: torch.Tensor, rows: int, group: dist.ProcessGroup) -> torch.Tensor:
    """x [n, C] behind the last `rows` rows of the rank before, [rows + n, C]; the first rank has only its own."""
    tails, rank = gather_rows(x[-rows:], group), group.rank()
    # the first rank takes no rows, and so takes part in the backward
    return torch.cat([tails.narrow(0, max(rank - 1, 0) * rows, rows if rank else 0), x])


def latent_attention(
    ctx: ModelContext, q: torch.Tensor, latent: torch.Tensor, expand: Expand, stream: PackedStream, scale: float,
    watch: Watch | None = None, *, again: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`context.latent_attention`: q [T/P, H, K], latent [T/P, C] -> [T/P, H, V].

    watch: is shown queries, keys and the keys' documents of every block, once. again: as there.
    """
    group = ctx.layout.cp
    blocks, border = query_rows(stream, group), border_of(stream, group)
    swapped = border == latent.shape[0]
    longest = stream.total if stream.spans is None else stream.spans.longest
    documents = None if watch is None else stream.document_ids()
    shown = [watch]  # taken by the first pass: the backward runs the core again

    def core(q: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        latents = gather_rows(latent, group) if swapped else behind_the_rank_before(latent, border, group)
        once = shown.pop() if shown else None
        return attend_blocks(ctx.backend, q, latents, expand, blocks, longest, scale, documents, once)

    rows = swap_halves(q, group) if swapped else q
    if again:  # as part of the whole layer, which keeps nothing before
        out = core(rows, latent)
    else:
        # keys and values of other ranks exist only while the core runs: the backward gathers and expands them again
        out = checkpoint(core, rows, latent, use_reentrant=False, preserve_rng_state=False)
    return swap_halves(out, group) if swapped else out


def attend_blocks(
    backend: Backend, q: torch.Tensor, latents: torch.Tensor, expand: Expand, blocks: Sequence[DeviceRows],
    longest: int, scale: float, documents: torch.Tensor | None = None, watch: Watch | None = None,
) -> torch.Tensor:  # fmt: skip
    """q [rows, H, K] of the blocks end to end, latents [n, C] of the stream from their `base` on -> [rows, H, V].

    longest: of a document. documents: int [T], of each token of the stream, which a watch needs.
    """
    base = blocks[0].base
    k, v = expand(latents[: max(block.last for block in blocks) - base])
    parts = []
    for block, part in zip(blocks, q.split([block.last - block.first for block in blocks])):
        # Keys before the first row's document have no queries, and a kernel need not write their gradients: whatever it
        # leaves there is dropped. A device test (test_backend_gpu.py) fills such rows with NaN to see that it is.
        keys, values = (live_rows(x[: block.last - base], block.first_key) for x in (k, v))
        if watch is not None and documents is not None:
            watch(part, keys, documents[base : block.last])
        parts.append(backend.suffixes_attention(part, keys, values, block.queries, block.keys, longest, scale))
    return torch.cat(parts)
