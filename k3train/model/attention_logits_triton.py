"""The largest attention logit of each head on a GPU: the products of flash attention, and of each tile its maximum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

QUERIES, KEYS, WIDTH = 128, 128, 64


@triton.jit
def _tile_maxima(
    q, k, starts, out, n, m, q_row, q_head, k_row, k_head,
    D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program a block of queries and a head: out[head, block] is the largest q . k that the block sees.

    starts int32 [m]: the first position of each position's document, so that the loop begins with the document.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    rows = block * QUERIES + tl.arange(0, QUERIES)
    at = rows + (m - n)
    inside = rows < n
    first = tl.load(starts + at, mask=inside, other=0)
    begin = tl.load(starts + block * QUERIES + (m - n)) // KEYS * KEYS
    end = tl.minimum(m, (block + 1) * QUERIES + (m - n))
    wide = tl.arange(0, WIDTH)
    best = tl.full((QUERIES,), float("-inf"), tl.float32)
    for start in range(begin, end, KEYS):
        columns = start + tl.arange(0, KEYS)
        scores = tl.zeros((QUERIES, KEYS), tl.float32)
        for d in tl.static_range(0, D, WIDTH):
            there = d + wide < D
            a = tl.load(q + rows[:, None] * q_row + head * q_head + d + wide, mask=inside[:, None] & there, other=0.0)
            b = tl.load(
                k + columns[None, :] * k_row + head * k_head + (d + wide)[:, None],
                mask=(columns < m)[None, :] & there[:, None], other=0.0,
            )  # fmt: skip
            scores = tl.dot(a, b, scores)
        seen = (columns[None, :] <= at[:, None]) & (columns[None, :] >= first[:, None]) & inside[:, None]
        best = tl.maximum(best, tl.max(tl.where(seen, scores, float("-inf")), axis=1))
    tl.store(out + head * tl.num_programs(0) + block, tl.max(best, axis=0))


def largest_products(q: torch.Tensor, k: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """max q . k over visible pairs, fp32 [H]: q [n, H, K] the last n of the m positions of k [m, H, K], bf16 or fp16;
    documents int32 [m], ascending."""
    (n, heads, width), m = q.shape, k.shape[0]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    if documents is None:
        starts = torch.zeros(m, dtype=torch.int32, device=q.device)
    else:
        documents = documents.contiguous()
        starts = torch.searchsorted(documents, documents, out_int32=True)
    blocks = triton.cdiv(n, QUERIES)
    out = torch.empty(heads, blocks, dtype=torch.float32, device=q.device)
    _tile_maxima[(blocks, heads)](
        q, k, starts, out, n, m, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        D=width, QUERIES=QUERIES, KEYS=KEYS, WIDTH=WIDTH, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out.amax(-1)
