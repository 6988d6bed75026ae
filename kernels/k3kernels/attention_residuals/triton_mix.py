"""Attention residuals on a GPU: four kernels, each one pass over the sources.

A row is read again from the cache where it is needed again, with a cache modifier so that the compiler does not keep it
in registers in between: more rows are in flight for it.

    forward    sources -> the mix, normed where asked
    first      the finished sources' part of it for several queries, its unfinished sums leave in fp32; `forward` can
               begin from them. The order of the additions is the same; both ways differ by fp32 rounding.
    backward   one mix: recomputes it from the sources; gradient of the running sum (added to what has arrived), of the
               key and of the norm weight; the gradient g in front of the norm and three numbers a source and token
    collect    once for up to eight mixes: gradients of the block's sources from their g and numbers

Sums over tokens are made per program, over a fixed number of programs: bitwise the same in every run.
"""

# mypy: disable-error-code="assignment"
# (tuples grow while a kernel is traced)

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.peaks import PEAKS
from k3kernels.triton_peaks import neighbours_peak, raise_peak

PROGRAMS = 1056  # of the backward: 8 for each of an H100's 132 multiprocessors; fixed, since it fixes the order of sums
COLUMNS = 512  # of a tile of `collect`
INTERPRETED = tl.constexpr(
    triton.knobs.runtime.interpret
)  # where a reduction of several tensors is a loop over numbers


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def _sums(t, K: tl.constexpr):
    """Sums of K tensors [BD], up to eight at a time: each sum alone waits for all warps."""
    found = ()
    if INTERPRETED:
        for i in tl.static_range(K):
            found = found + (tl.sum(t[i], 0),)
        return found
    G: tl.constexpr = 8 if K > 4 else (4 if K > 2 else K)
    for i in tl.static_range((K + G - 1) // G):
        group = ()
        for k in tl.static_range(G):
            group = group + (t[min(G * i + k, K - 1)],)  # the last one again where a group is not full
        if G == 8:
            sums = tl.reduce(group, 0, _add8)
        elif G == 4:
            sums = tl.reduce(group, 0, _add4)
        elif G == 2:
            sums = tl.reduce(group, 0, _add2)
        else:
            sums = (tl.sum(group[0], 0),)  # type: ignore[misc]
        found = found + sums
    return found


@triton.jit
def first_phase_kernel(
    sources, keys_ptr, state_ptr, top_ptr, sum_ptr, scores_ptr, rows, queries, eps,
    N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). sources: N of [rows, D]; keys fp32 [queries, D] -> state fp32 [queries, rows, D], the
    sum of sources weighted by exp(score - top), top, sum fp32 [queries, rows], and all but the last of scores fp32
    [queries, rows, N + 1, 2]: score and 1 / rms."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BD)
    inside = column < D
    at = row * D + column
    squares = ()
    for j in tl.static_range(N):
        v = tl.load(sources[j] + at, mask=inside, other=0.0).to(tl.float32)
        squares = squares + (v * v,)
    norms = _sums(squares, N)
    for q in range(queries):
        key = tl.load(keys_ptr + q * D + column, mask=inside, other=0.0)
        products = ()
        for j in tl.static_range(N):
            v = tl.load(sources[j] + at, mask=inside, other=0.0).to(tl.float32)
            products = products + (v * key,)
        dots = _sums(products, N)
        offset = tl.cast(q, tl.int64) * rows
        place = scores_ptr + (offset + row) * (2 * N + 2)
        top = dots[0] * (1.0 / tl.sqrt(norms[0] / D + eps))
        for j in tl.static_range(N):
            r = 1.0 / tl.sqrt(norms[j] / D + eps)
            tl.store(place + 2 * j, dots[j] * r)
            tl.store(place + 2 * j + 1, r)
            top = tl.maximum(top, dots[j] * r)
        acc = tl.zeros([BD], tl.float32)
        total = tl.zeros([], tl.float32)
        for j in tl.static_range(N):
            weight = tl.exp(dots[j] * (1.0 / tl.sqrt(norms[j] / D + eps)) - top)
            v = tl.load(sources[j] + at, mask=inside, other=0.0, cache_modifier=".ca").to(tl.float32)
            acc = tl.fma(v, weight, acc)
            total += weight
        tl.store(state_ptr + offset * D + at, acc, mask=inside)
        tl.store(top_ptr + offset + row, top)
        tl.store(sum_ptr + offset + row, total)


@triton.jit
def forward_kernel(
    bank, partial_ptr, key_ptr, state_ptr, top_ptr, sum_ptr, norm_ptr, out_ptr, scores_ptr, lse_ptr, peak_ptr, rows, eps,
    norm_eps,
    N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PARTIAL: tl.constexpr, RESUME: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). bank: N of [rows, D], and one more with PARTIAL; key fp32 [D]; out [rows, D]; lse fp32
    [rows]; scores fp32 [rows, N + PARTIAL, 2]. RESUME: the bank's part comes from `first_phase_kernel`. peak fp32
    [SLOTS] of out, or None."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BD)
    inside = column < D
    at = row * D + column
    key = tl.load(key_ptr + column, mask=inside, other=0.0)
    M: tl.constexpr = 0 if RESUME else N
    terms = ()
    for j in tl.static_range(M + PARTIAL):
        if j < M:
            v = tl.load(bank[j] + at, mask=inside, other=0.0).to(tl.float32)
        else:
            v = tl.load(partial_ptr + at, mask=inside, other=0.0).to(tl.float32)
        terms = terms + (v * v, v * key)
    sums = _sums(terms, 2 * (M + PARTIAL))
    place = scores_ptr + row * (2 * (N + PARTIAL))
    if RESUME:
        acc = tl.load(state_ptr + at, mask=inside, other=0.0)
        top = tl.load(top_ptr + row)
        total = tl.load(sum_ptr + row)
    else:
        top = sums[1] * (1.0 / tl.sqrt(sums[0] / D + eps))
        for j in tl.static_range(M):
            r = 1.0 / tl.sqrt(sums[2 * j] / D + eps)
            tl.store(place + 2 * j, sums[2 * j + 1] * r)
            tl.store(place + 2 * j + 1, r)
            top = tl.maximum(top, sums[2 * j + 1] * r)
        acc = tl.zeros([BD], tl.float32)
        total = tl.zeros([], tl.float32)
        for j in tl.static_range(M):
            weight = tl.exp(sums[2 * j + 1] * (1.0 / tl.sqrt(sums[2 * j] / D + eps)) - top)
            v = tl.load(bank[j] + at, mask=inside, other=0.0, cache_modifier=".ca").to(tl.float32)
            acc = tl.fma(v, weight, acc)
            total += weight
    if PARTIAL:  # joins last and apart, so that both ways round alike
        r = 1.0 / tl.sqrt(sums[2 * M] / D + eps)
        score = sums[2 * M + 1] * r
        tl.store(place + 2 * N, score)
        tl.store(place + 2 * N + 1, r)
        higher = tl.maximum(top, score)
        keep = tl.exp(top - higher)
        weight = tl.exp(score - higher)
        v = tl.load(partial_ptr + at, mask=inside, other=0.0, cache_modifier=".ca").to(tl.float32)
        acc = tl.fma(v, weight, acc * keep)
        total = tl.fma(total, keep, weight)
        top = higher
    out = (acc / total).to(out_ptr.dtype.element_ty)
    if NORM:
        x = out.to(tl.float32)
        r = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + norm_eps)
        w = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        out = (x * r).to(out_ptr.dtype.element_ty).to(tl.float32) * w
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=inside)
    if peak_ptr is not None:
        # outside it is zero; as rounded, because the product above is one of 16 bits where it can be
        raise_peak(peak_ptr, tl.abs(out.to(tl.float32)), out_ptr.dtype.element_ty)
    tl.store(lse_ptr + row, top + tl.log(total))


@triton.jit
def backward_kernel(
    bank, partial_ptr, key_ptr, norm_ptr, scores_ptr, lse_ptr, grad_ptr, grad_partial_ptr, out_partial_ptr, g_ptr, numbers_ptr,
    grad_key_ptr, grad_norm_ptr, peak_ptr, rows, norm_eps,
    N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PARTIAL: tl.constexpr, ADD: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Grid (programs,); program i does rows i, i + programs, ....

    bank: N of [rows, D]; numbers fp32 [rows, N, 3]: weight, factor of the key, factor of the source; grad_key,
    grad_norm fp32 [programs, D]. peak fp32 [SLOTS] of out_partial, or None.
    """
    column = tl.arange(0, BD)
    inside = column < D
    key = tl.load(key_ptr + column, mask=inside, other=0.0)
    grad_key = tl.zeros([BD], tl.float32)
    grad_norm = tl.zeros([BD], tl.float32)
    EACH: tl.constexpr = min(8, BD)
    peak = tl.zeros([BD // EACH], tl.float32)
    kind = grad_ptr.dtype.element_ty
    S: tl.constexpr = N + PARTIAL
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        at = row * D + column
        lse = tl.load(lse_ptr + row)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            later = tl.load(grad_partial_ptr + at, mask=inside, other=0.0)
        mixed = tl.zeros([BD], tl.float32)
        given = scores_ptr + row * (2 * S)
        for j in tl.static_range(S):
            weight = tl.exp(tl.load(given + 2 * j) - lse)
            if j < N:
                v = tl.load(bank[j] + at, mask=inside, other=0.0).to(tl.float32)
            else:
                v = tl.load(partial_ptr + at, mask=inside, other=0.0).to(tl.float32)
            mixed += weight * v
        if NORM:
            x = mixed.to(kind).to(tl.float32)
            w = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
            h = grad * w
            both = _sums((x * x, h * x), 2)
            r = 1.0 / tl.sqrt(both[0] / D + norm_eps)
            normed = x * r
            grad_norm += grad * normed.to(kind).to(tl.float32)
            g = r * (h - normed * (both[1] * r / D))
        else:
            g = grad
        tl.store(g_ptr + at, g.to(kind), mask=inside)
        products = (g * mixed,)
        for j in tl.static_range(S):
            if j < N:
                v = tl.load(bank[j] + at, mask=inside, other=0.0, cache_modifier=".ca").to(tl.float32)
            else:
                v = tl.load(partial_ptr + at, mask=inside, other=0.0, cache_modifier=".ca").to(tl.float32)
            products = products + (g * v,)
        inner = _sums(products, S + 1)
        for j in tl.static_range(S):
            score, r = tl.load(given + 2 * j), tl.load(given + 2 * j + 1)
            weight = tl.exp(score - lse)
            slope = weight * (inner[j + 1] - inner[0]) * r
            pull = slope * score * r / D  # score = (v . key) r with dr/dv = -r^3 v / D
            if j < N:
                v = tl.load(bank[j] + at, mask=inside, other=0.0).to(tl.float32)
            else:
                v = tl.load(partial_ptr + at, mask=inside, other=0.0).to(tl.float32)
            grad_key += slope * v
            if j < N:
                place = numbers_ptr + row * (3 * N) + 3 * j
                tl.store(place, weight)
                tl.store(place + 1, slope)
                tl.store(place + 2, pull)
            else:
                own = weight * g + slope * key - pull * v
                if ADD:
                    own += later.to(tl.float32)
                tl.store(out_partial_ptr + at, own.to(kind), mask=inside)
                if peak_ptr is not None:  # outside it is zero
                    peak = tl.maximum(peak, neighbours_peak(own, EACH))
    if peak_ptr is not None:
        raise_peak(peak_ptr, peak, kind)
    place = tl.program_id(0).to(tl.int64) * D + column
    tl.store(grad_key_ptr + place, grad_key, mask=inside)
    if NORM:
        tl.store(grad_norm_ptr + place, grad_norm, mask=inside)


@triton.jit
def collect_kernel(
    bank, arrived, outs, g_ptr, keys_ptr, numbers_ptr, rows,
    N: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ARRIVED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Grid (programs, ceil(D / BD)); program i does rows i, i + programs, ...

    g [M, rows, D]; keys fp32 [M, D]; numbers fp32 [M, rows, N, 3]. Bit j of ARRIVED: arrived[j] is to be added. ADD:
    outs hold a sum already.
    """
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    in_column = column < D
    size = tl.cast(rows, tl.int64)
    keys = ()
    for s in tl.static_range(M):
        keys = keys + (tl.load(keys_ptr + s * D + column, mask=in_column, other=0.0),)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * D + column
        gs = ()
        for s in tl.static_range(M):
            gs = gs + (tl.load(g_ptr + size * (s * D) + at, mask=in_column, other=0.0),)
        for j in tl.static_range(N):
            v = tl.load(bank[j] + at, mask=in_column, other=0.0).to(tl.float32)
            acc = tl.zeros([BD], tl.float32)
            if ADD:
                acc += tl.load(outs[j] + at, mask=in_column, other=0.0).to(tl.float32)
            if ARRIVED >> j & 1:
                acc += tl.load(arrived[j] + at, mask=in_column, other=0.0).to(tl.float32)
            first = numbers_ptr + tl.cast(row, tl.int64) * (3 * N) + 3 * j
            pulls = tl.load(first + 2)
            for s in tl.static_range(M):
                place = first + size * (s * 3 * N)
                acc += tl.load(place) * gs[s].to(tl.float32) + tl.load(place + 1) * keys[s]
                if s > 0:
                    pulls += tl.load(place + 2)
            acc -= pulls * v
            tl.store(outs[j] + at, acc.to(outs[j].dtype.element_ty), mask=in_column)


def _tile(width: int) -> tuple[int, int]:
    """Columns of a row (a power of two) and warps."""
    columns = triton.next_power_of_2(width)
    return columns, 4 if columns <= 2048 else 8


def forward_triton(
    bank: tuple[Tensor, ...], partial: Tensor | None, key: Tensor, eps: float, output_weight: Tensor | None,
    output_eps: float, state: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """bank n of [T, d], partial [T, d] -> (normed) mix [T, d], scores and 1 / rms of the sources fp32 [T, n, 2] (n + 1
    with a partial), lse fp32 [T]. state: what `first_phase` left of this query, with a partial only. The peak of a normed
    mix, which products read, is noted."""
    rows, width = bank[0].shape
    out = torch.empty_like(bank[0])
    lse = torch.empty(rows, dtype=torch.float32, device=out.device)
    scores = lse.new_empty(rows, len(bank) + (partial is not None), 2)
    acc, top, total, scores = (out, lse, lse, scores) if state is None else state
    peak = None if output_weight is None else PEAKS.slots(out.device)
    if rows:
        BD, warps = _tile(width)
        forward_kernel[(rows,)](
            bank, out if partial is None else partial, key, acc, top, total,
            key if output_weight is None else output_weight, out, scores, lse, peak, rows, eps, output_eps, N=len(bank),
            D=width, BD=BD, PARTIAL=int(partial is not None), RESUME=state is not None, NORM=output_weight is not None,
            num_warps=warps,
        )  # fmt: skip
    PEAKS.note(out, peak)
    return out, scores, lse


def first_phase(sources: tuple[Tensor, ...], keys: Tensor, eps: float) -> tuple[Tensor, ...]:
    """The sources' part of the mixes of all keys [M, d]: fp32 sums [M, T, d], highest scores and denominators [M, T],
    and scores [M, T, n + 1, 2] whose last is still to come."""
    rows, width = sources[0].shape
    acc = torch.empty(keys.shape[0], rows, width, dtype=torch.float32, device=keys.device)
    top, total = torch.empty(2, keys.shape[0], rows, dtype=torch.float32, device=keys.device)
    scores = acc.new_empty(keys.shape[0], rows, len(sources) + 1, 2)
    if rows:
        BD, warps = _tile(width)
        first_phase_kernel[(rows,)](
            sources, keys, acc, top, total, scores, rows, keys.shape[0], eps, N=len(sources), D=width, BD=BD,
            num_warps=warps,
        )  # fmt: skip
    return acc, top, total, scores


def backward_triton(
    bank: tuple[Tensor, ...], partial: Tensor | None, key: Tensor, output_weight: Tensor | None,
    output_eps: float, scores: Tensor, lse: Tensor, grad: Tensor, grad_partial: Tensor | None, g: Tensor, numbers: Tensor,
) -> tuple[Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """Fills g [T, d] and numbers fp32 [T, n, 3]; returns the gradients of partial, key and output_weight (fp32).
    The peak of the first, which is the gradient of a product's output too, is noted."""
    rows, width = grad.shape
    normed = output_weight is not None
    own = None if partial is None else torch.empty_like(partial)
    BD, warps = _tile(width)
    programs = min(rows, PROGRAMS)
    sums = torch.empty(1 + normed, programs, width, dtype=torch.float32, device=grad.device)
    peak = None if own is None else PEAKS.slots(grad.device)
    if rows:
        backward_kernel[(programs,)](
            bank, grad if partial is None else partial, key, key if output_weight is None else output_weight, scores, lse,
            grad, grad if grad_partial is None else grad_partial, grad if own is None else own, g, numbers, sums[0],
            sums[-1], peak, rows, output_eps, N=len(bank), D=width, BD=BD, PARTIAL=int(partial is not None),
            ADD=grad_partial is not None, NORM=normed, num_warps=warps,
        )  # fmt: skip
    if own is not None:
        PEAKS.note(own, peak)
    totals = sums.sum(1)
    return own, totals[0], totals[1] if normed else None


def collect_triton(
    bank: tuple[Tensor, ...], arrived: list[Tensor | None], outs: tuple[Tensor, ...], g: Tensor, keys: Tensor,
    numbers: Tensor, *, add: bool,
) -> None:  # fmt: skip
    """outs [n] of [T, d] := (outs if add) + arrived + gradients of the bank by mixes g [M, T, d], numbers [M, T, n, 3]."""
    rows, width = bank[0].shape
    if rows == 0:
        return
    flags = sum(1 << j for j, t in enumerate(arrived) if t is not None)
    BD = min(COLUMNS, triton.next_power_of_2(width))
    collect_kernel[(min(rows, PROGRAMS), triton.cdiv(width, BD))](
        bank, tuple(v if t is None else t for v, t in zip(bank, arrived)), outs, g, keys, numbers, rows, N=len(bank),
        M=g.shape[0], D=width, BD=BD, ARRIVED=flags, ADD=add, num_warps=4,
    )  # fmt: skip
