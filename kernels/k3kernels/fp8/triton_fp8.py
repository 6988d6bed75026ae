"""One pass over the tensor each way: three bytes a value in bf16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
"""Rows of a program, of one block of values each."""


@triton.jit
def quantise_kernel(x_ptr, values_ptr, scales_ptr, rows, width, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    at = row[:, None] * width + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), 1) / 448.0
    scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(values_ptr + at, (x / scale[:, None]).to(tl.float8e4nv), mask=inside)
    tl.store(scales_ptr + row * blocks + block, scale, mask=row < rows)


@triton.jit
def dequantise_kernel(values_ptr, scales_ptr, x_ptr, rows, width, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    at = row[:, None] * width + column[None, :]
    scale = tl.load(scales_ptr + row * blocks + block, mask=row < rows, other=1.0)
    values = tl.load(values_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + at, (values * scale[:, None]).to(x_ptr.dtype.element_ty), mask=inside)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, d] contiguous."""
    from k3kernels.fp8.ops import BLOCK

    rows, width = x.shape
    blocks = -(-width // BLOCK)
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
    if x.numel():
        grid = (triton.cdiv(rows, ROWS), blocks)
        quantise_kernel[grid](x, values, scales, rows, width, blocks, ROWS=ROWS, BLOCK=BLOCK, num_warps=4)
    return values, scales


def dequantise(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """values [rows, d] and scales [rows, ceil(d / BLOCK)], contiguous."""
    from k3kernels.fp8.ops import BLOCK

    rows, width = values.shape
    x = torch.empty(rows, width, dtype=dtype, device=values.device)
    if x.numel():
        grid = (triton.cdiv(rows, ROWS), scales.shape[1])
        dequantise_kernel[grid](
            values, scales, x, rows, width, scales.shape[1], ROWS=ROWS, BLOCK=BLOCK, num_warps=4
        )  # fmt: skip
    return x
