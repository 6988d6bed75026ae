"""Attention residuals on a GPU: three kernels, each one pass over the sources.

    forward    sources -> the mix, normed where asked, by an online softmax. With several queries it is the first phase
               of a block (its unfinished sums leave in fp32); with such a sum to begin from it is the second. The order
               of the additions is the same, so both ways give the same bits.
    backward   one mix: recomputes it from the sources; gradient of the running sum (added to what has arrived), of the
               key and of the norm weight; the gradient g in front of the norm and three numbers a source and token
    collect    once for up to eight mixes: gradients of the block's sources from their g and numbers

Sums over tokens are made per program, over a fixed number of programs: bitwise the same in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 528  # of the backward: 4 for each of an H100's 132 multiprocessors; fixed, since it fixes the order of sums
TILE = 4096  # elements of a source that a program holds at a time
COLUMNS = 1024  # of a tile of `collect`


@triton.jit
def forward_kernel(
    sources, keys_ptr, state_ptr, top_ptr, sum_ptr, norm_ptr, out_ptr, lse_ptr, rows, queries, eps, norm_eps,
    N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, RESUME: tl.constexpr, PAUSE: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(rows / BT),). sources: N of [rows, D]; keys [queries, D]; state fp32 [queries, rows, D]; top, sum fp32
    [queries, rows]; out [rows, D] and lse [rows] unless PAUSE, which writes the state instead. RESUME: one query."""
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    column = tl.arange(0, BD)
    in_row, in_column = row < rows, column < D
    inside = in_row[:, None] & in_column[None, :]
    at = row[:, None] * D + column[None, :]
    for q in range(queries):
        key = tl.load(keys_ptr + q * D + column, mask=in_column, other=0.0)
        if RESUME:
            acc = tl.load(state_ptr + at, mask=inside, other=0.0)
            top = tl.load(top_ptr + row, mask=in_row, other=0.0)
            total = tl.load(sum_ptr + row, mask=in_row, other=1.0)
        else:
            acc = tl.zeros([BT, BD], tl.float32)
            top = tl.full([BT], float("-inf"), tl.float32)
            total = tl.zeros([BT], tl.float32)
        for j in tl.static_range(N):
            v = tl.load(sources[j] + at, mask=inside, other=0.0).to(tl.float32)
            score = tl.sum(v * key[None, :], 1) / tl.sqrt(tl.sum(v * v, 1) / D + eps)
            higher = tl.maximum(top, score)
            keep = tl.exp(top - higher)
            weight = tl.exp(score - higher)
            acc = acc * keep[:, None] + weight[:, None] * v
            total = total * keep + weight
            top = higher
        if PAUSE:
            offset = tl.cast(q, tl.int64) * rows
            tl.store(state_ptr + offset * D + at, acc, mask=inside)
            tl.store(top_ptr + offset + row, top, mask=in_row)
            tl.store(sum_ptr + offset + row, total, mask=in_row)
        else:
            out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            if NORM:
                x = out.to(tl.float32)
                r = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + norm_eps)
                w = tl.load(norm_ptr + column, mask=in_column, other=0.0).to(tl.float32)
                out = (x * r[:, None]).to(out_ptr.dtype.element_ty).to(tl.float32) * w[None, :]
            tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)
            tl.store(lse_ptr + row, top + tl.log(total), mask=in_row)


@triton.jit
def backward_kernel(
    bank, partial_ptr, key_ptr, norm_ptr, lse_ptr, grad_ptr, grad_partial_ptr, out_partial_ptr, g_ptr, numbers_ptr,
    grad_key_ptr, grad_norm_ptr, rows, blocks, eps, norm_eps,
    N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, PARTIAL: tl.constexpr, ADD: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Grid (programs,); program i does blocks i, i + programs, ... of BT rows.

    bank: N of [rows, D]; numbers fp32 [3, N, rows]: weight, factor of the key, factor of the source; grad_key,
    grad_norm fp32 [programs, D].
    """
    column = tl.arange(0, BD)
    in_column = column < D
    key = tl.load(key_ptr + column, mask=in_column, other=0.0)
    grad_key = tl.zeros([BD], tl.float32)
    grad_norm = tl.zeros([BD], tl.float32)
    kind = grad_ptr.dtype.element_ty
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BT + tl.arange(0, BT)
        in_row = row < rows
        inside = in_row[:, None] & in_column[None, :]
        at = row[:, None] * D + column[None, :]
        lse = tl.load(lse_ptr + row, mask=in_row, other=0.0)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        mixed = tl.zeros([BT, BD], tl.float32)
        weights = ()
        dots = ()
        scales = ()
        for j in tl.static_range(N + PARTIAL):
            if j < N:
                v = tl.load(bank[j] + at, mask=inside, other=0.0).to(tl.float32)
            else:
                v = tl.load(partial_ptr + at, mask=inside, other=0.0).to(tl.float32)
            r = 1.0 / tl.sqrt(tl.sum(v * v, 1) / D + eps)
            dot = tl.sum(v * key[None, :], 1)
            a = tl.exp(dot * r - lse)
            mixed += a[:, None] * v
            weights = weights + (a,)
            dots = dots + (dot,)
            scales = scales + (r,)
        if NORM:
            x = mixed.to(kind).to(tl.float32)
            r = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + norm_eps)
            normed = x * r[:, None]
            grad_norm += tl.sum(grad * normed.to(kind).to(tl.float32), 0)
            w = tl.load(norm_ptr + column, mask=in_column, other=0.0).to(tl.float32)
            h = grad * w[None, :]
            g = r[:, None] * (h - normed * (tl.sum(h * normed, 1) / D)[:, None])
        else:
            g = grad
        total = tl.sum(g * mixed, 1)
        for j in tl.static_range(N + PARTIAL):
            if j < N:
                v = tl.load(bank[j] + at, mask=inside, other=0.0).to(tl.float32)
            else:
                v = tl.load(partial_ptr + at, mask=inside, other=0.0).to(tl.float32)
            slope = weights[j] * (tl.sum(g * v, 1) - total) * scales[j]
            pull = slope * dots[j] * scales[j] * scales[j] / D
            grad_key += tl.sum(slope[:, None] * v, 0)
            if j < N:
                place = numbers_ptr + tl.cast(rows, tl.int64) * j + row
                step = tl.cast(rows, tl.int64) * N
                tl.store(place, weights[j], mask=in_row)
                tl.store(place + step, slope, mask=in_row)
                tl.store(place + 2 * step, pull, mask=in_row)
            else:
                own = weights[j][:, None] * g + slope[:, None] * key[None, :] - pull[:, None] * v
                if ADD:
                    own += tl.load(grad_partial_ptr + at, mask=inside, other=0.0).to(tl.float32)
                tl.store(out_partial_ptr + at, own.to(kind), mask=inside)
        tl.store(g_ptr + at, g.to(kind), mask=inside)
    place = tl.program_id(0).to(tl.int64) * D + column
    tl.store(grad_key_ptr + place, grad_key, mask=in_column)
    if NORM:
        tl.store(grad_norm_ptr + place, grad_norm, mask=in_column)


@triton.jit
def collect_kernel(
    bank, arrived, outs, g_ptr, keys_ptr, numbers_ptr, rows,
    N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, ARRIVED: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(rows / BT), ceil(D / BD)). g [M, rows, D]; keys fp32 [M, D]; numbers fp32 [M, 3, N, rows]. Bit j of
    ARRIVED: arrived[j] is to be added. ADD: outs hold a sum already."""
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    in_row, in_column = row < rows, column < D
    inside = in_row[:, None] & in_column[None, :]
    at = row[:, None] * D + column[None, :]
    size = tl.cast(rows, tl.int64)
    gs = ()
    for s in tl.static_range(M):
        gs = gs + (tl.load(g_ptr + size * (s * D) + at, mask=inside, other=0.0),)
    for j in tl.static_range(N):
        v = tl.load(bank[j] + at, mask=inside, other=0.0).to(tl.float32)
        acc = tl.zeros([BT, BD], tl.float32)
        if ADD:
            acc += tl.load(outs[j] + at, mask=inside, other=0.0).to(tl.float32)
        if ARRIVED >> j & 1:
            acc += tl.load(arrived[j] + at, mask=inside, other=0.0).to(tl.float32)
        pulls = tl.zeros([BT], tl.float32)
        for s in tl.static_range(M):
            key = tl.load(keys_ptr + s * D + column, mask=in_column, other=0.0)
            place = numbers_ptr + size * (s * 3 * N + j) + row
            weight = tl.load(place, mask=in_row, other=0.0)
            slope = tl.load(place + size * N, mask=in_row, other=0.0)
            pulls += tl.load(place + size * (2 * N), mask=in_row, other=0.0)
            acc += weight[:, None] * gs[s].to(tl.float32) + slope[:, None] * key[None, :]
        acc -= pulls[:, None] * v
        tl.store(outs[j] + at, acc.to(outs[j].dtype.element_ty), mask=inside)


def _tile(width: int) -> tuple[int, int, int]:
    """Columns (a power of two) and rows of a tile, and warps."""
    columns = triton.next_power_of_2(width)
    return columns, max(1, TILE // columns), 4 if columns <= 2048 else 8


def forward_triton(
    sources: tuple[Tensor, ...], key: Tensor, eps: float, output_weight: Tensor | None, output_eps: float,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """sources [T, d] -> (normed) mix [T, d], lse fp32 [T]. state: what `first_phase` left of this query."""
    rows, width = sources[0].shape
    out = torch.empty_like(sources[0])
    lse = torch.empty(rows, dtype=torch.float32, device=out.device)
    if rows:
        BD, BT, warps = _tile(width)
        acc, top, total = (out, lse, lse) if state is None else state
        forward_kernel[(triton.cdiv(rows, BT),)](
            sources, key, acc, top, total, key if output_weight is None else output_weight, out, lse, rows, 1, eps,
            output_eps, N=len(sources), D=width, BD=BD, BT=BT, RESUME=state is not None, PAUSE=False,
            NORM=output_weight is not None, num_warps=warps,
        )  # fmt: skip
    return out, lse


def first_phase(sources: tuple[Tensor, ...], keys: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sources' part of the mixes of all keys [M, d]: fp32 sums [M, T, d], highest scores and denominators [M, T]."""
    rows, width = sources[0].shape
    acc = torch.empty(keys.shape[0], rows, width, dtype=torch.float32, device=keys.device)
    top, total = torch.empty(2, keys.shape[0], rows, dtype=torch.float32, device=keys.device)
    if rows:
        BD, BT, warps = _tile(width)
        forward_kernel[(triton.cdiv(rows, BT),)](
            sources, keys, acc, top, total, keys, acc, top, rows, keys.shape[0], eps, eps, N=len(sources), D=width,
            BD=BD, BT=BT, RESUME=False, PAUSE=True, NORM=False, num_warps=warps,
        )  # fmt: skip
    return acc, top, total


def backward_triton(
    bank: tuple[Tensor, ...], partial: Tensor | None, key: Tensor, eps: float, output_weight: Tensor | None,
    output_eps: float, lse: Tensor, grad: Tensor, grad_partial: Tensor | None, g: Tensor, numbers: Tensor,
) -> tuple[Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """Fills g [T, d] and numbers fp32 [3, n, T]; returns the gradients of partial, key and output_weight (fp32)."""
    rows, width = grad.shape
    normed = output_weight is not None
    own = None if partial is None else torch.empty_like(partial)
    BD, BT, warps = _tile(width)
    blocks = triton.cdiv(rows, BT)
    programs = min(blocks, PROGRAMS)
    sums = torch.empty(1 + normed, programs, width, dtype=torch.float32, device=grad.device)
    if rows:
        backward_kernel[(programs,)](
            bank, grad if partial is None else partial, key, key if output_weight is None else output_weight, lse,
            grad, grad if grad_partial is None else grad_partial, grad if own is None else own, g, numbers, sums[0],
            sums[-1], rows, blocks, eps, output_eps, N=len(bank), D=width, BD=BD, BT=BT, PARTIAL=int(partial is not None),
            ADD=grad_partial is not None, NORM=normed, num_warps=warps,
        )  # fmt: skip
    totals = sums.sum(1)
    return own, totals[0], totals[1] if normed else None


def collect_triton(
    bank: tuple[Tensor, ...], arrived: list[Tensor | None], outs: tuple[Tensor, ...], g: Tensor, keys: Tensor,
    numbers: Tensor, *, add: bool,
) -> None:  # fmt: skip
    """outs [n] of [T, d] := (outs if add) + arrived + gradients of the bank by mixes g [M, T, d], numbers [M, 3, n, T]."""
    rows, width = bank[0].shape
    if rows == 0:
        return
    flags = sum(1 << j for j, t in enumerate(arrived) if t is not None)
    BD = min(COLUMNS, triton.next_power_of_2(width))
    BT = max(1, COLUMNS // BD)
    collect_kernel[(triton.cdiv(rows, BT), triton.cdiv(width, BD))](
        bank, tuple(v if t is None else t for v, t in zip(bank, arrived)), outs, g, keys, numbers, rows, N=len(bank),
        M=g.shape[0], D=width, BD=BD, BT=BT, ARRIVED=flags, ADD=add, num_warps=4,
    )  # fmt: skip
