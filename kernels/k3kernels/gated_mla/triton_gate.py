"""The output gate of Gated MLA on a GPU, forward and backward: each tensor is read and written once, only inputs are kept."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.peaks import PEAKS
from k3kernels.triton_peaks import raise_peak

BLOCK = 4096  # elements of a program


@triton.jit
def forward_kernel(o_ptr, gate_ptr, y_ptr, peak_ptr, n, BLOCK: tl.constexpr):
    """Grid (ceil(n / BLOCK),); o, gate, y [n]. peak fp32 [SLOTS] of y, or None."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    inside = at < n - start
    o = tl.load(o_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    y = o * tl.sigmoid(gate)
    kind: tl.constexpr = y_ptr.dtype.element_ty
    tl.store(y_ptr + start + at, y.to(kind), mask=inside)
    if peak_ptr is not None:
        raise_peak(peak_ptr, tl.abs(y), kind)


@triton.jit
def backward_kernel(o_ptr, gate_ptr, dy_ptr, do_ptr, dgate_ptr, peak_ptr, n, BLOCK: tl.constexpr):
    """Grid (ceil(n / BLOCK),); all [n]. peak fp32 [SLOTS] of dgate, or None."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    inside = at < n - start
    o = tl.load(o_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(tl.load(gate_ptr + start + at, mask=inside, other=0.0).to(tl.float32))
    do = tl.load(dy_ptr + start + at, mask=inside, other=0.0).to(tl.float32) * s
    dgate = do * o * (1.0 - s)
    kind: tl.constexpr = dgate_ptr.dtype.element_ty
    tl.store(do_ptr + start + at, do.to(do_ptr.dtype.element_ty), mask=inside)
    tl.store(dgate_ptr + start + at, dgate.to(kind), mask=inside)
    if peak_ptr is not None:
        raise_peak(peak_ptr, tl.abs(dgate), kind)


class TritonSigmoidGate(torch.autograd.Function):
    """o, gate [..., C] -> [..., C] like gate."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(o, gate)
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        peak = PEAKS.slots(y.device)
        if n := y.numel():
            forward_kernel[(triton.cdiv(n, BLOCK),)](
                o.contiguous(), gate.contiguous(), y, peak, n, BLOCK=BLOCK, num_warps=8
            )
        PEAKS.note(y, peak)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        o, gate = ctx.saved_tensors
        do, dgate = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (o, gate))
        peak = PEAKS.slots(gate.device)
        if n := gate.numel():
            backward_kernel[(triton.cdiv(n, BLOCK),)](
                o.contiguous(), gate.contiguous(), dy.contiguous(), do, dgate, peak, n, BLOCK=BLOCK, num_warps=8
            )
        PEAKS.note(dgate, peak)
        return do, dgate
