"""The routing kernels. Selection keeps a block of tokens times all experts in registers; sorting by expert is a counting
sort (experts of each block counted, counts summed over blocks, copies placed), so nothing depends on a race and no size
is asked for on the host. Integer atomics alone add up the histogram: its result is the same in every run."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 8192  # tokens times experts that a program holds
WIDE = 1024  # channels that a program moves at a time
STRIP, DEEP = 8, 512  # experts, a sector of memory, and blocks of tokens that a program sums over at a time


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, weights_ptr, scores_ptr, experts_ptr, cut_ptr, cut_expert_ptr, T, E, scale,
    K: tl.constexpr, RENORMALIZE: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T / BT),): k + 1 rounds of taking the largest biased score."""
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    j = tl.arange(0, BK)
    live = row < T
    x = tl.load(logits_ptr + row[:, None] * E + e[None, :], mask=live[:, None] & (e < E)[None, :], other=0.0)
    s = 1.0 / (1.0 + tl.exp(-x))
    bias = tl.load(bias_ptr + e, mask=e < E, other=0.0)
    biased = s + bias[None, :]
    biased = tl.where(biased == biased, biased, -1e30)  # NaN must not select a column that does not exist
    biased = tl.where((e < E)[None, :], biased, float("-inf"))
    scores = tl.zeros([BT, BK], tl.float32)
    experts = tl.zeros([BT, BK], tl.int32)
    for i in tl.static_range(K):
        best = tl.argmax(biased, 1)
        chosen = e[None, :] == best[:, None]
        score = tl.sum(tl.where(chosen, s, 0.0), 1)
        scores = tl.where(j[None, :] == i, score[:, None], scores)
        experts = tl.where(j[None, :] == i, best[:, None], experts)
        biased = tl.where(chosen, float("-inf"), biased)
    weights = scores
    if RENORMALIZE:
        weights = weights / (tl.sum(scores, 1) + 1e-20)[:, None]
    at = row[:, None] * K + j[None, :]
    inside = live[:, None] & (j < K)[None, :]
    tl.store(weights_ptr + at, weights * scale, mask=inside)
    tl.store(scores_ptr + at, scores, mask=inside)
    tl.store(experts_ptr + at, experts.to(tl.int64), mask=inside)
    tl.store(cut_ptr + row, tl.max(biased, 1), mask=live)
    tl.store(cut_expert_ptr + row, tl.argmax(biased, 1).to(tl.int64), mask=live)


@triton.jit
def route_backward_kernel(
    grad_ptr, scores_ptr, experts_ptr, out_ptr, T, E, scale,
    K: tl.constexpr, RENORMALIZE: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """w_i = scale s_i / S: ds_i = scale (g_i - sum_j g_j s_j / S) / S; then through the sigmoid, s (1 - s)."""
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    j = tl.arange(0, BK)
    live = row < T
    at = row[:, None] * K + j[None, :]
    inside = live[:, None] & (j < K)[None, :]
    g = tl.load(grad_ptr + at, mask=inside, other=0.0) * scale
    s = tl.load(scores_ptr + at, mask=inside, other=0.0)
    if RENORMALIZE:
        total = tl.sum(s, 1) + 1e-20
        g = (g - (tl.sum(g * s, 1) / total)[:, None]) / total[:, None]
    ds = g * s * (1.0 - s)
    out = tl.zeros([BT, BE], tl.float32)
    for i in tl.static_range(K):
        expert = tl.load(experts_ptr + row * K + i, mask=live, other=-1)
        value = tl.sum(tl.where(j[None, :] == i, ds, 0.0), 1)
        out += tl.where(e[None, :] == expert[:, None], value[:, None], 0.0)
    tl.store(out_ptr + row[:, None] * E + e[None, :], out, mask=live[:, None] & (e < E)[None, :])


@triton.jit
def histogram_kernel(
    logits_ptr, bias_ptr, cut_ptr, cut_expert_ptr, valid_ptr, counts_ptr, T, E, bins,
    VALID: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T / BT),); one integer atomic a token and expert."""
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    live = row < T
    if VALID:
        live = live & (tl.load(valid_ptr + row, mask=live, other=0) != 0)
    x = tl.load(logits_ptr + row[:, None] * E + e[None, :], mask=live[:, None] & (e < E)[None, :], other=0.0)
    s = 1.0 / (1.0 + tl.exp(-x))
    bias = tl.load(bias_ptr + e, mask=e < E, other=0.0)
    low = tl.min(tl.where(e < E, bias, float("inf")), 0).to(tl.float64) - 1.0
    high = tl.max(tl.where(e < E, bias, float("-inf")), 0).to(tl.float64) + 1.0
    cut = tl.load(cut_ptr + row, mask=live, other=0.0).to(tl.float64)
    own = tl.load(cut_expert_ptr + row, mask=live, other=-1)
    r = cut[:, None] - s.to(tl.float64)
    r = tl.where(e[None, :] == own[:, None], bias.to(tl.float64)[None, :], r)
    place = (r - low) * bins / (high - low)
    place = tl.where(place == place, place, 0.0)
    place = tl.minimum(tl.maximum(place, 0.0), bins - 1.0).to(tl.int64)  # truncation is floor here
    one = tl.full([BT, BE], 1, tl.int64)
    tl.atomic_add(
        counts_ptr + e[None, :] * bins + place, one, mask=live[:, None] & (e < E)[None, :], sem="relaxed"
    )  # fmt: skip


@triton.jit
def count_kernel(
    experts_ptr, valid_ptr, counts_ptr, T, E, K: tl.constexpr, VALID: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    """counts int32 [blocks, E]: copies that the valid tokens of each block of BT send to each expert."""
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    live = row < T
    if VALID:
        live = live & (tl.load(valid_ptr + row, mask=live, other=0) != 0)
    total = tl.zeros([BE], tl.int32)
    for i in tl.static_range(K):
        expert = tl.load(experts_ptr + row * K + i, mask=live, other=-1)
        total += tl.sum((e[None, :] == expert[:, None]).to(tl.int32), 0)
    tl.store(counts_ptr + tl.program_id(0).to(tl.int64) * E + e, total, mask=e < E)


@triton.jit
def scan_kernel(blocks_ptr, before_ptr, counts_ptr, N, E, BN: tl.constexpr, BE: tl.constexpr):
    """Grid (ceil(E / BE),): before int32 [N, E], the sums over the rows of blocks int32 [N, E] above each, and counts int64
    [E], those over all. Not in place: threads may hold a small tile more than once, and read it when others have written."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    total = tl.zeros([BE], tl.int32)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        at = n.to(tl.int64)[:, None] * E + e[None, :]
        inside = (n < N)[:, None] & (e < E)[None, :]
        here = tl.load(blocks_ptr + at, mask=inside, other=0)
        tl.store(before_ptr + at, total[None, :] + tl.cumsum(here, 0) - here, mask=inside)
        total += tl.sum(here, 0)
    tl.store(counts_ptr + e, total.to(tl.int64), mask=e < E)


@triton.jit
def place_kernel(
    experts_ptr, before_ptr, counts_ptr, source_ptr, place_ptr, T, E,
    K: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """before int32 [blocks, E]: copies to each expert that the blocks before hold; counts int64 [E]: that all hold."""
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    live = row < T
    counts = tl.load(counts_ptr + e, mask=e < E, other=0).to(tl.int32)
    base = tl.load(before_ptr + tl.program_id(0).to(tl.int64) * E + e, mask=e < E, other=0)
    base += tl.cumsum(counts, 0) - counts
    taken = tl.zeros([BT, BE], tl.int32)
    for i in tl.static_range(K):
        expert = tl.load(experts_ptr + row * K + i, mask=live, other=-1)
        taken += (e[None, :] == expert[:, None]).to(tl.int32)
    at = base[None, :] + tl.cumsum(taken, 0) - taken
    for i in tl.static_range(K):
        expert = tl.load(experts_ptr + row * K + i, mask=live, other=-1)
        there = tl.sum(tl.where(e[None, :] == expert[:, None], at, 0), 1)
        copy = row * K + i
        tl.store(place_ptr + copy, there, mask=live)
        tl.store(source_ptr + there, copy.to(tl.int32), mask=live)


@triton.jit
def spread_kernel(x_ptr, source_ptr, out_ptr, D, K: tl.constexpr, BD: tl.constexpr):
    """Grid (rows, ceil(D / BD)): row i is the row of token source[i] // K."""
    i = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    token = (tl.load(source_ptr + i) // K).to(tl.int64)
    tl.store(out_ptr + i * D + d, tl.load(x_ptr + token * D + d, mask=d < D), mask=d < D)


@triton.jit
def gather_kernel(
    rows_ptr, more_ptr, place_ptr, out_ptr, D, K: tl.constexpr, MORE: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Grid (tokens, ceil(D / BD)): the sum of the K rows of a token, in fp32; with MORE, of both tensors' rows."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros([BD], tl.float32)
    for i in tl.static_range(K):
        there = tl.load(place_ptr + t * K + i).to(tl.int64)
        row = tl.load(rows_ptr + there * D + d, mask=d < D, other=0.0).to(tl.float32)
        if MORE:
            row += tl.load(more_ptr + there * D + d, mask=d < D, other=0.0).to(tl.float32)
        total += row
    tl.store(out_ptr + t * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


def _blocks(tokens: int, experts: int) -> tuple[int, int, int]:
    """Programs, tokens a program, experts padded to a power of two."""
    wide = triton.next_power_of_2(experts)
    rows = max(1, min(32, TILE // wide))
    return triton.cdiv(tokens, rows), rows, wide


def route(
    logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """weights and scores fp32 [T, k], experts int64 [T, k], cut-off fp32 [T] and expert int64 [T]."""
    T, E = logits.shape
    weights = logits.new_empty(T, top_k)
    scores = torch.empty_like(weights)
    experts = torch.empty(T, top_k, dtype=torch.int64, device=logits.device)
    cut = logits.new_empty(T)
    cut_expert = torch.empty(T, dtype=torch.int64, device=logits.device)
    programs, rows, wide = _blocks(T, E)
    if T:
        route_kernel[(programs,)](
            logits, bias, weights, scores, experts, cut, cut_expert, T, E, scale, K=top_k, RENORMALIZE=renormalize,
            BT=rows, BE=wide, BK=triton.next_power_of_2(top_k), num_warps=4,
        )  # fmt: skip
    return weights, scores, experts, cut, cut_expert


def route_backward(
    grad: Tensor, scores: Tensor, experts: Tensor, count: int, renormalize: bool, scale: float
) -> Tensor:
    """Gradient of the logits fp32 [T, E]."""
    T, top_k = scores.shape
    out = scores.new_empty(T, count)
    programs, rows, wide = _blocks(T, count)
    if T:
        route_backward_kernel[(programs,)](
            grad.contiguous(), scores, experts, out, T, count, scale, K=top_k, RENORMALIZE=renormalize, BT=rows,
            BE=wide, BK=triton.next_power_of_2(top_k), num_warps=4,
        )  # fmt: skip
    return out


def histogram(
    logits: Tensor, bias: Tensor, cut: Tensor, cut_expert: Tensor, counts: Tensor, valid: Tensor | None
) -> None:
    """Add to counts int64 [E, bins], contiguous."""
    T, E = logits.shape
    programs, rows, wide = _blocks(T, E)
    mask = cut if valid is None else valid.contiguous().view(torch.uint8)
    if T:
        histogram_kernel[(programs,)](
            logits, bias, cut, cut_expert, mask, counts, T, E, counts.shape[1], VALID=valid is not None, BT=rows,
            BE=wide, num_warps=4,
        )  # fmt: skip


def _block_counts(experts: Tensor, count: int, valid: Tensor | None) -> Tensor:
    """int32 [blocks, E]: copies of each block of valid tokens to each expert; T > 0."""
    T, top_k = experts.shape
    programs, rows, wide = _blocks(T, count)
    blocks = torch.empty(programs, count, dtype=torch.int32, device=experts.device)
    mask = experts if valid is None else valid.contiguous().view(torch.uint8)
    count_kernel[(programs,)](
        experts, mask, blocks, T, count, K=top_k, VALID=valid is not None, BT=rows, BE=wide, num_warps=4
    )
    return blocks


def scan(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """blocks int32 [N, E] -> the sums over the rows above each, int32 [N, E], and those over all, int64 [E]."""
    N, E = blocks.shape
    before, counts = torch.empty_like(blocks), torch.empty(E, dtype=torch.int64, device=blocks.device)
    deep = min(DEEP, triton.next_power_of_2(N))
    scan_kernel[(triton.cdiv(E, STRIP),)](blocks, before, counts, N, E, BN=deep, BE=STRIP, num_warps=4)
    return before, counts


def expert_counts(experts: Tensor, count: int, valid: Tensor | None) -> Tensor:
    """int64 [E]."""
    if not experts.numel():
        return torch.zeros(count, dtype=torch.int64, device=experts.device)
    return _block_counts(experts, count, valid).sum(0)


def permutation(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """source int32 [T * k], place int32 [T * k], counts int64 [E]."""
    T, top_k = experts.shape
    source = torch.empty(T * top_k, dtype=torch.int32, device=experts.device)
    place = torch.empty_like(source)
    if not T:
        return source, place, torch.zeros(count, dtype=torch.int64, device=experts.device)
    programs, rows, wide = _blocks(T, count)
    before, counts = scan(_block_counts(experts, count, None))
    place_kernel[(programs,)](
        experts, before, counts, source, place, T, count, K=top_k, BT=rows, BE=wide, num_warps=4
    )  # fmt: skip
    return source, place, counts


def spread(x: Tensor, source: Tensor, top_k: int) -> Tensor:
    """x [T, D] -> [rows, D]."""
    rows, D = source.shape[0], x.shape[1]
    out = x.new_empty(rows, D)
    block = min(WIDE, triton.next_power_of_2(D))
    if rows:
        spread_kernel[(rows, triton.cdiv(D, block))](x, source, out, D, K=top_k, BD=block, num_warps=2)
    return out


def gather(rows: Tensor, more: Tensor | None, place: Tensor, top_k: int) -> Tensor:
    """[T * k, D], and as many more to add to them, or None -> [T, D]."""
    tokens, D = place.shape[0] // top_k, rows.shape[1]
    out = rows.new_empty(tokens, D)
    block = min(WIDE, triton.next_power_of_2(D))
    if tokens:
        gather_kernel[(tokens, triton.cdiv(D, block))](
            rows, rows if more is None else more, place, out, D, K=top_k, MORE=more is not None, BD=block, num_warps=2
        )
    return out
