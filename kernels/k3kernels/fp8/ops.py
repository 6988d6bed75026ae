"""Public entries of the FP8 copies."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
"""Values of a row that share a scale."""
LARGEST = 448.0
"""The largest finite value of E4M3."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def quantise(x: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Round to E4M3 with a scale for each BLOCK values of a row.

    Args:
        x: [..., d]; fp32, bf16 or fp16.
        backend: auto (Triton on CUDA, else torch), torch or triton.

    Returns:
        values float8_e4m3fn [rows, d] and scales fp32 [rows, ceil(d / BLOCK)]: x is values * scale of its block, within
        1/16 of each value and 2^-10 / 448 of the block's largest. A block with an infinity or a NaN comes back as NaN.

    Raises:
        TypeError: x has another dtype.
    """
    if x.dtype not in FLOATS:
        raise TypeError(f"x: expected fp32, bf16 or fp16, got {x.dtype}")
    flat = x.reshape(-1, x.shape[-1])
    if backend == "triton" or (backend == "auto" and flat.is_cuda):
        from k3kernels.fp8 import triton_fp8  # imports triton, which CPU users may lack

        return triton_fp8.quantise(flat.contiguous())
    rows, width = flat.shape
    blocks = -(-width // BLOCK)
    padded = torch.nn.functional.pad(flat.float(), (0, blocks * BLOCK - width)).view(rows, blocks, BLOCK)
    scales = padded.abs().amax(-1) / LARGEST
    scales = torch.where(scales == 0, 1.0, scales)
    values = (padded / scales[..., None]).view(rows, blocks * BLOCK)[:, :width]
    return values.to(torch.float8_e4m3fn), scales


def dequantise(values: Tensor, scales: Tensor, dtype: torch.dtype, *, backend: str = "auto") -> Tensor:
    """The inverse: values [rows, d] and scales [rows, ceil(d / BLOCK)] of `quantise` -> [rows, d] in `dtype`."""
    if backend == "triton" or (backend == "auto" and values.is_cuda):
        from k3kernels.fp8 import triton_fp8

        return triton_fp8.dequantise(values, scales, dtype)
    each = scales.repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]
    return (values.float() * each).to(dtype)
