"""Chunk table of a packed stream, computed on the device.

Nothing here waits for the device: the grid is the static bound ceil(T/64) + N and the kernels skip unused chunks, so a
step with packed documents can be captured in a CUDA graph and replayed with other cu_seqlens of the same length.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def chunk_table_kernel(cu_ptr, table_ptr, doc_ptr, N, NC, BN: tl.constexpr, BC: tl.constexpr):
    """table [NC, 2] = (first row, rows) of each chunk; doc [N, 4] = (first chunk, chunks, first row, end row)."""
    cg = tl.program_id(0) * BC + tl.arange(0, BC)
    n = tl.arange(0, BN)
    base = 0
    row = tl.zeros((BC,), tl.int32)
    rows = tl.zeros((BC,), tl.int32)
    for n0 in range(0, N, BN):
        live = n0 + n < N
        start = tl.load(cu_ptr + n0 + n, mask=live, other=0).to(tl.int32)
        end = tl.load(cu_ptr + n0 + n + 1, mask=live, other=0).to(tl.int32)
        chunks = (end - start + 63) // 64
        last = base + tl.cumsum(chunks, 0)
        first = last - chunks
        inside = (cg[:, None] >= first[None, :]) & (cg[:, None] < last[None, :])
        r = start[None, :] + (cg[:, None] - first[None, :]) * 64
        row += tl.sum(tl.where(inside, r, 0), 1)
        rows += tl.sum(tl.where(inside, tl.minimum(end[None, :] - r, 64), 0), 1)
        if tl.program_id(0) == 0:
            p = doc_ptr + (n0 + n) * 4
            tl.store(p, first, mask=live)
            tl.store(p + 1, chunks, mask=live)
            tl.store(p + 2, start, mask=live)
            tl.store(p + 3, end, mask=live)
        base += tl.sum(chunks, 0)
    tl.store(table_ptr + cg * 2, row, mask=cg < NC)
    tl.store(table_ptr + cg * 2 + 1, rows, mask=cg < NC)


def chunk_table(cu_seqlens: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(table int32 [NC, 2], documents int32 [N, 4], NC) with NC = ceil(tokens / 64) + N, a bound known on the host."""
    n = cu_seqlens.numel() - 1
    nc = (tokens + 63) // 64 + n
    table = torch.empty(nc, 2, dtype=torch.int32, device=cu_seqlens.device)
    doc = torch.empty(n, 4, dtype=torch.int32, device=cu_seqlens.device)
    bc = 64
    chunk_table_kernel[(triton.cdiv(nc, bc),)](cu_seqlens, table, doc, n, nc, BN=64, BC=bc, num_warps=4)
    return table, doc, nc
