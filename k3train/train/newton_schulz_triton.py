"""Muon's own kernels on a GPU: symmetric products for Newton-Schulz, and one pass over memory before and after it.

Two of the three products of a step are symmetric, X X^T and the square of that: tiles on and below the diagonal are
computed, the others mirrored, so that of 4 A^2 B + 2 A^3 FLOPs for an A x B matrix about a third is never done.

`polynomial` makes the whole factor of a step, a I + b G + c G^2, so that the third product is X <- P X and nothing is
added to it; in the first step it divides by the norm of X as well, whose square is the trace of X X^T.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

TILE, DEPTH = 128, 64
WARPS, STAGES = 8, 3
REGISTERS = 65536 // 2 // 256  # a thread of 8 warps: two programs an SM. At most 8 bytes spill
SMALLEST = 1e-14  # square of the smallest norm that is divided by


@triton.jit
def _lower_tiles(
    x, out, table, squares, n, k, x_batch, x_row, x_column, a, b, c,
    EVEN: tl.constexpr, FACTOR: tl.constexpr, NORMED: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One program a tile (i, j), j <= i, and a matrix: out = x x^T there and at (j, i), or, with x a symmetric matrix,
    a I + b x + c x^2 (FACTOR). NORMED: with x over s and all over sqrt(s), s one number a matrix in `squares`."""
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
            tall = tl.load(left, mask=(rows < n)[:, None] & there[None, :], other=0.0)
            wide = tl.load(right, mask=(columns < n)[None, :] & there[:, None], other=0.0)
            total = tl.dot(tall, wide, total)
        left += DEPTH * x_column
        right += DEPTH * x_column
    inside = (rows < n)[:, None] & (columns < n)[None, :]
    out += matrix * n * n
    place = rows[:, None] * n + columns[None, :]  # 32 bits: fewer registers, so that two programs share an SM
    if FACTOR:
        added = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            inverse = 1.0 / tl.load(squares + matrix)
            total, added = total * inverse * inverse, added * inverse
        total = c * total + b * added + tl.where(rows[:, None] == columns[None, :], a, 0.0)
        if NORMED:
            total *= tl.sqrt(inverse)
    value = total.to(out.dtype.element_ty)
    tl.store(out + place, value, mask=inside)
    tl.store(out + columns[None, :] * n + rows[:, None], value, mask=inside & (i > j))


@functools.cache
def _table(tiles: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([(i, j) for i in range(tiles) for j in range(i + 1)], dtype=torch.int32, device=device)


def symmetric_product(x: torch.Tensor) -> torch.Tensor:
    """x x^T of each matrix of a stack: x [N, n, k] of any strides, bf16 or fp16 -> [N, n, n], summed in fp32."""
    return _launch(x, None, None)


def polynomial(gram: torch.Tensor, a: float, b: float, c: float, squares: torch.Tensor | None = None) -> torch.Tensor:
    """a I + b G + c G^2 of each matrix of a contiguous stack of symmetric ones [N, n, n], summed in fp32, rounded once.

    squares: fp32 [N], s > 0 of each matrix where G is s times the one that is meant; the factor is over sqrt(s) too,
    so that it takes X of norm sqrt(s) to what it takes X of norm one to.
    """
    return _launch(gram, (a, b, c), squares)


def _launch(
    x: torch.Tensor, factor: tuple[float, float, float] | None, squares: torch.Tensor | None
) -> torch.Tensor:  # fmt: skip
    count, n, k = x.shape
    out = torch.empty(count, n, n, dtype=x.dtype, device=x.device)
    table = _table(-(-n // TILE), x.device)
    _lower_tiles[(table.shape[0], count)](
        x, out, table, table if squares is None else squares, n, k, *x.stride(), *(factor or (0.0, 0.0, 0.0)),
        EVEN=n % TILE == 0 and k % DEPTH == 0, FACTOR=factor is not None, NORMED=squares is not None,
        TILE=TILE, DEPTH=DEPTH, num_warps=WARPS, num_stages=STAGES, maxnreg=REGISTERS,
    )  # fmt: skip
    return out


def traces(gram: torch.Tensor) -> torch.Tensor:
    """Trace of each matrix of a stack [N, n, n], fp32 [N]: of X X^T, the square of the norm of X. Not below SMALLEST."""
    return gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float32).clamp_min_(SMALLEST)


@triton.jit
def _momentum(grad, buffer, out, size, grad_stride, buffer_stride, momentum, BLOCK: tl.constexpr):
    """buffer <- grad + momentum buffer and out = grad + momentum buffer (Nesterov), of number program_id(1)."""
    matrix = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(grad + matrix * grad_stride + at, mask=inside, other=0.0)
    b = g + momentum * tl.load(buffer + matrix * buffer_stride + at, mask=inside, other=0.0)
    tl.store(buffer + matrix * buffer_stride + at, b, mask=inside)
    tl.store(out + matrix * size + at, (g + momentum * b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _decay_and_add(weight, update, size, weight_stride, decay, alpha, BLOCK: tl.constexpr):
    """weight <- decay weight + alpha update, of number program_id(1)."""
    matrix = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    w = tl.load(weight + matrix * weight_stride + at, mask=inside, other=0.0)
    u = tl.load(update + matrix * size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(weight + matrix * weight_stride + at, decay * w + alpha * u, mask=inside)


BLOCK = 2048


def fits(*stacks: torch.Tensor) -> bool:
    """Whether the one-pass kernels take these stacks [n, A, B] on a GPU: whole rows, one after another in a matrix."""
    return all(x.is_cuda and x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] for x in stacks)


def _grid(stack: torch.Tensor) -> tuple[int, int]:
    return triton.cdiv(stack[0].numel(), BLOCK), stack.shape[0]


def momentum_(grad: torch.Tensor, buffer: torch.Tensor, out: torch.Tensor, momentum: float) -> None:
    """fp32 stacks grad, buffer [n, A, B] -> buffer in place, and the Nesterov momentum in the contiguous `out`."""
    size = out[0].numel()
    _momentum[_grid(out)](grad, buffer, out, size, grad.stride(0), buffer.stride(0), momentum, BLOCK=BLOCK)


def decay_and_add_(weight: torch.Tensor, update: torch.Tensor, decay: float, alpha: float) -> None:
    """weight <- decay weight + alpha update: fp32 [n, A, B] in place, update contiguous in any dtype."""
    _decay_and_add[_grid(weight)](weight, update, update[0].numel(), weight.stride(0), decay, alpha, BLOCK=BLOCK)
