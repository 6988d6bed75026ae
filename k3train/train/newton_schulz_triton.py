"""Symmetric products for Newton-Schulz on a GPU: tiles on and below the diagonal are computed, the others mirrored.

Two of the three products of a step are symmetric, X X^T and the square of that, so that of 4 A^2 B + 2 A^3 FLOPs for an
A x B matrix about a third is never done.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

TILE, DEPTH = 128, 64


@triton.jit
def _lower_tiles(
    x, c, out, table, n, k, x_batch, x_row, x_column, alpha, beta,
    EVEN: tl.constexpr, ADD: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One program a tile (i, j), j <= i, and a matrix: out = alpha x x^T + beta c there and at (j, i)."""
    pair, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, j = tl.load(table + 2 * pair), tl.load(table + 2 * pair + 1)
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    x += matrix * x_batch
    left = x + rows[:, None] * x_row + depth[None, :] * x_column
    right = x + columns[None, :] * x_row + depth[:, None] * x_column
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, k, DEPTH):
        if EVEN:
            total = tl.dot(tl.load(left), tl.load(right), total)
        else:
            there = start + depth < k
            a = tl.load(left, mask=(rows < n)[:, None] & there[None, :], other=0.0)
            b = tl.load(right, mask=(columns < n)[None, :] & there[:, None], other=0.0)
            total = tl.dot(a, b, total)
        left += DEPTH * x_column
        right += DEPTH * x_column
    inside = (rows < n)[:, None] & (columns < n)[None, :]
    place = matrix * n * n + rows[:, None] * n + columns[None, :]
    if ADD:
        total = alpha * total + beta * tl.load(c + place, mask=inside, other=0.0).to(tl.float32)
    value = total.to(out.dtype.element_ty)
    tl.store(out + place, value, mask=inside)
    tl.store(out + matrix * n * n + columns[None, :] * n + rows[:, None], value, mask=inside & (i > j))


@functools.cache
def _table(tiles: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([(i, j) for i in range(tiles) for j in range(i + 1)], dtype=torch.int32, device=device)


def symmetric_product(
    x: torch.Tensor, add: torch.Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    """x x^T, or alpha x x^T + beta add with a symmetric `add`, of each matrix of a stack: x [N, n, k] of any strides,
    bf16 or fp16 -> [N, n, n], summed in fp32."""
    count, n, k = x.shape
    out = torch.empty(count, n, n, dtype=x.dtype, device=x.device)
    table = _table(-(-n // TILE), x.device)
    _lower_tiles[(table.shape[0], count)](
        x, out if add is None else add, out, table, n, k, *x.stride(), alpha, beta,
        EVEN=n % TILE == 0 and k % DEPTH == 0, ADD=add is not None, TILE=TILE, DEPTH=DEPTH, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out
