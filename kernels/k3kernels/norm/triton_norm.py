"""The gated RMS norm on a GPU, forward and backward: each tensor is read and written once.

The backward recomputes the norm from o, so nothing but the inputs is saved. dweight is summed per program in fp32, and
over a fixed number of programs afterwards: bitwise the same in every run.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.peaks import PEAKS
from k3kernels.triton_peaks import neighbours_peak, raise_peak

PROGRAMS = 1056  # of the backward: 8 for each of an H100's 132 SMs; fixed, since it fixes the order of dweight's sum
TILE = 4096  # elements a program holds at a time


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def forward_kernel(
    o_ptr, gate_ptr, weight_ptr, y_ptr, peak_ptr, rows, eps, V: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """Grid (ceil(rows / BR),); all tensors [rows, V] contiguous. peak fp32 [SLOTS] of y, or None."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.arange(0, BV)
    at = row[:, None] * V + column[None, :]
    inside = (row < rows)[:, None] & (column < V)[None, :]
    o = tl.load(o_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < V, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(o * o, 1) / V + eps)
    y = o * r[:, None] * weight[None, :] * _sigmoid(gate)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    if peak_ptr is not None:  # outside it is zero
        raise_peak(peak_ptr, tl.abs(y), y_ptr.dtype.element_ty)


@triton.jit
def backward_kernel(
    o_ptr, gate_ptr, weight_ptr, dy_ptr, do_ptr, dgate_ptr, dweight_ptr, peak_ptr, rows, eps, blocks,
    V: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid (programs,); program i does blocks i, i + programs, ... of BR rows; dweight [programs, V].
    peak fp32 [SLOTS] of dgate, or None."""
    column = tl.arange(0, BV)
    in_v = column < V
    weight = tl.load(weight_ptr + column, mask=in_v, other=0.0).to(tl.float32)
    dweight = tl.zeros([BV], tl.float32)
    EACH: tl.constexpr = min(8, BR * BV)
    peak = tl.zeros([BR * BV // EACH], tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BR + tl.arange(0, BR)
        at = row[:, None] * V + column[None, :]
        inside = (row < rows)[:, None] & in_v[None, :]
        o = tl.load(o_ptr + at, mask=inside, other=0.0).to(tl.float32)
        s = _sigmoid(tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32))
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        r = 1.0 / tl.sqrt(tl.sum(o * o, 1) / V + eps)
        n = o * r[:, None]
        dys = dy * s
        dweight += tl.sum(dys * n, 0)
        dn = dys * weight[None, :]
        dgate = dn * n * (1.0 - s)
        do = (dn - n * (tl.sum(dn * n, 1) / V)[:, None]) * r[:, None]
        tl.store(do_ptr + at, do.to(do_ptr.dtype.element_ty), mask=inside)
        tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
        if peak_ptr is not None:  # outside it is zero
            peak = tl.maximum(peak, neighbours_peak(dgate, EACH))
    if peak_ptr is not None:
        raise_peak(peak_ptr, peak, dgate_ptr.dtype.element_ty)
    tl.store(dweight_ptr + tl.program_id(0).to(tl.int64) * V + column, dweight, mask=in_v)


def _blocks(V: int) -> tuple[int, int]:
    """Columns (a power of two) and rows of a block."""
    BV = triton.next_power_of_2(V)
    return BV, max(1, TILE // BV)


class TritonGatedRMSNorm(torch.autograd.Function):
    """o, gate [..., V], weight [V]."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        o, gate, weight = o.contiguous(), gate.contiguous(), weight.contiguous()
        ctx.save_for_backward(o, gate, weight)
        ctx.eps = eps
        y = torch.empty_like(o)
        V = o.shape[-1]
        BV, BR = _blocks(V)
        peak = PEAKS.slots(o.device)
        if o.numel():
            rows = o.numel() // V
            forward_kernel[(triton.cdiv(rows, BR),)](
                o, gate, weight, y, peak, rows, eps, V=V, BV=BV, BR=BR, num_warps=4
            )  # fmt: skip
        PEAKS.note(y, peak)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        o, gate, weight = ctx.saved_tensors
        dy = dy.contiguous()
        do, dgate = torch.empty_like(o), torch.empty_like(gate)
        if o.numel() == 0:
            return do, dgate, torch.zeros_like(weight), None
        V = o.shape[-1]
        BV, BR = _blocks(V)
        rows = o.numel() // V
        blocks = triton.cdiv(rows, BR)
        programs = min(blocks, PROGRAMS)
        partial = torch.empty(programs, V, dtype=torch.float32, device=o.device)
        peak = PEAKS.slots(o.device)
        backward_kernel[(programs,)](
            o, gate, weight, dy, do, dgate, partial, peak, rows, ctx.eps, blocks, V=V, BV=BV, BR=BR, num_warps=4
        )
        PEAKS.note(dgate, peak)  # do is no product's
        return do, dgate, partial.sum(0).to(weight.dtype), None


def gated_rms_norm_triton(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`k3kernels.norm.gated_rms_norm` on Triton; arguments already checked."""
    return TritonGatedRMSNorm.apply(o, gate, weight, eps)
