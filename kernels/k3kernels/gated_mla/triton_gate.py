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
def forward_kernel(o_ptr, gate_ptr, y_ptr, slots_ptr, n, BLOCK: tl.constexpr, PEAK: tl.constexpr):
    """Grid (ceil(n / BLOCK),); o, gate, y [n]. PEAK: slots are raised to the largest magnitude of y."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    inside = at < n - start
    o = tl.load(o_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    y = (o * tl.sigmoid(gate)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + start + at, y, mask=inside)
    if PEAK:
        raise_peak(slots_ptr, tl.abs(y.to(tl.float32)), y.dtype)


@triton.jit
def backward_kernel(
    o_ptr, gate_ptr, dy_ptr, do_ptr, dgate_ptr, slots_ptr, n, BLOCK: tl.constexpr, PEAK: tl.constexpr
):  # fmt: skip
    """Grid (ceil(n / BLOCK),); all [n]. PEAK: slots are raised to the largest magnitude of dgate."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    inside = at < n - start
    o = tl.load(o_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(tl.load(gate_ptr + start + at, mask=inside, other=0.0).to(tl.float32))
    do = tl.load(dy_ptr + start + at, mask=inside, other=0.0).to(tl.float32) * s
    dgate = (do * o * (1.0 - s)).to(dgate_ptr.dtype.element_ty)
    tl.store(do_ptr + start + at, do.to(do_ptr.dtype.element_ty), mask=inside)
    tl.store(dgate_ptr + start + at, dgate, mask=inside)
    if PEAK:
        raise_peak(slots_ptr, tl.abs(dgate.to(tl.float32)), dgate.dtype)


class TritonSigmoidGate(torch.autograd.Function):
    """o, gate [..., C] -> [..., C] like gate; peak: whether that of the result is noted."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor, peak: bool) -> Tensor:
        ctx.save_for_backward(o, gate)
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if n := y.numel():
            slots = PEAKS.slots(y.device) if peak else None
            forward_kernel[(triton.cdiv(n, BLOCK),)](
                o.contiguous(), gate.contiguous(), y, y if slots is None else slots, n, BLOCK=BLOCK,
                PEAK=slots is not None, num_warps=8,
            )  # fmt: skip
            PEAKS.note(y, slots)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        o, gate = ctx.saved_tensors
        do, dgate = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (o, gate))
        if n := gate.numel():
            slots = PEAKS.slots(gate.device)
            backward_kernel[(triton.cdiv(n, BLOCK),)](
                o.contiguous(), gate.contiguous(), dy.contiguous(), do, dgate, dgate if slots is None else slots, n,
                BLOCK=BLOCK, PEAK=slots is not None, num_warps=8,
            )  # fmt: skip
            PEAKS.note(dgate, slots)
        return do, dgate, None
