"""The RMS norm on a GPU, forward and backward: each tensor is read and written once, only the inputs are kept.

The weight's gradient is summed per program in fp32, and over a fixed number of programs afterwards: bitwise the same in
every run.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1056  # of the backward: 8 for each of an H100's 132 multiprocessors; fixed, since it fixes the order of sums
TILE = 2048  # elements a program holds at a time, or one row


@triton.jit
def forward_kernel(
    x_ptr, weight_ptr, y_ptr, rows, step, eps, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """Grid (ceil(rows / BR),); x [rows, D] with a row stride, y contiguous."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BD)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    x = tl.load(x_ptr + row[:, None] * step + column[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column[None, :], mask=(column < D)[None, :], other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
    kind = y_ptr.dtype.element_ty
    y = (x * r[:, None]).to(kind).to(tl.float32) * weight
    tl.store(y_ptr + row[:, None] * D + column[None, :], y.to(kind), mask=inside)


@triton.jit
def backward_kernel(
    x_ptr, weight_ptr, dy_ptr, dx_ptr, dweight_ptr, rows, step, eps, blocks,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid (programs,); program i does blocks i, i + programs, ... of BR rows; dweight fp32 [programs, D]."""
    column = tl.arange(0, BD)
    in_d = (column < D)[None, :]
    weight = tl.load(weight_ptr + column[None, :], mask=in_d, other=0.0).to(tl.float32)
    dweight = tl.zeros([BR, BD], tl.float32)
    kind = dx_ptr.dtype.element_ty
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BR + tl.arange(0, BR)
        inside = (row < rows)[:, None] & in_d
        x = tl.load(x_ptr + row[:, None] * step + column[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
        r = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
        h = dy * weight
        along = tl.sum(h * x, 1) * r * r / D
        dweight += dy * (x * r[:, None]).to(kind).to(tl.float32)
        dx = (h - x * along[:, None]) * r[:, None]
        tl.store(dx_ptr + row[:, None] * D + column[None, :], dx.to(kind), mask=inside)
    place = dweight_ptr + tl.program_id(0).to(tl.int64) * D + column
    tl.store(place, tl.sum(dweight, 0), mask=column < D)


def _rows(x: Tensor) -> Tensor:
    """x [..., d] as [rows, d] with contiguous columns; a view where its strides allow."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _tile(D: int) -> tuple[int, int]:
    BD = triton.next_power_of_2(D)
    return BD, max(1, TILE // BD)


class TritonRMSNorm(torch.autograd.Function):
    """x [..., d], weight [d]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        flat = _rows(x)
        rows, D = flat.shape
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if y.numel():
            BD, BR = _tile(D)
            forward_kernel[(triton.cdiv(rows, BR),)](
                flat, weight, y, rows, flat.stride(0), eps, D=D, BD=BD, BR=BR, num_warps=4
            )
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        flat, dy = _rows(x), dy.contiguous()
        rows, D = flat.shape
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if dx.numel() == 0:
            return dx, torch.zeros_like(weight), None
        BD, BR = _tile(D)
        blocks = triton.cdiv(rows, BR)
        programs = min(blocks, PROGRAMS)
        partial = torch.empty(programs, D, dtype=torch.float32, device=x.device)
        backward_kernel[(programs,)](
            flat, weight, dy, dx, partial, rows, flat.stride(0), ctx.eps, blocks, D=D, BD=BD, BR=BR, num_warps=4
        )
        return dx, partial.sum(0).to(weight.dtype), None
