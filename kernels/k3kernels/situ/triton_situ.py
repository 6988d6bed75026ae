"""SiTU-GLU on a GPU, forward and backward: each tensor is read and written once, only the inputs are kept."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.peaks import PEAKS
from k3kernels.triton_peaks import SLOTS, neighbours_peak, raise_peak

COLUMNS = 1024  # of a tile


@triton.jit
def _saturate(x, slope):
    """tanh(slope x), accurate near zero too, where 1 - e^-2x cancels; one exponential and one division."""
    y = slope * x
    e = tl.exp(-2.0 * tl.abs(y))
    far = (1.0 - e) / (1.0 + e)
    square = y * y
    near = y * (1.0 + square * (-0.33333334 + square * (0.13333334 - square * 0.053968254)))
    return tl.where(tl.abs(y) < 0.15, near, tl.where(y < 0, -far, far))


@triton.jit
def _gate(g, slope, HALF: tl.constexpr):
    """tanh(slope g) and sigmoid(g) with one division; HALF: slope is 1/4, and e^-|g| the square of e^-|g|/2."""
    y = slope * g
    e = tl.exp(-2.0 * tl.abs(y))
    square = e * e if HALF else tl.exp(-tl.abs(g))
    r = 1.0 / ((1.0 + e) * (1.0 + square))
    far = (1.0 - e) * (1.0 + square) * r
    y2 = y * y
    near = y * (1.0 + y2 * (-0.33333334 + y2 * (0.13333334 - y2 * 0.053968254)))
    t = tl.where(tl.abs(y) < 0.15, near, tl.where(g < 0, -far, far))
    s = (1.0 + e) * r * tl.where(g < 0, square, 1.0)
    return t, s


@triton.jit
def forward_kernel(
    gate_ptr, up_ptr, scale_ptr, y_ptr, peak_ptr, rows, gate_step, up_step, beta, linear_beta, slope, linear_slope,
    H: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, BOUNDED: tl.constexpr, SCALED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(rows / BR), ceil(H / BH)). gate, up [rows, H] with row strides; y [rows, H] contiguous.
    slope, linear_slope: 1 / beta, 1 / linear_beta. peak fp32 [SLOTS] of y, or None."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    column = tl.program_id(1) * BH + tl.arange(0, BH)
    inside = (row < rows)[:, None] & (column < H)[None, :]
    g = tl.load(gate_ptr + row[:, None] * gate_step + column[None, :], mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up_ptr + row[:, None] * up_step + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if BOUNDED:
        u = linear_beta * _saturate(u, linear_slope)
    t, s = _gate(g, slope, HALF)
    y = beta * t * s * u
    if SCALED:
        y *= tl.load(scale_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + row[:, None] * H + column[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
    if peak_ptr is not None:  # outside it is zero
        raise_peak(peak_ptr, tl.abs(y), y_ptr.dtype.element_ty)


@triton.jit
def backward_kernel(
    gate_ptr, up_ptr, scale_ptr, dy_ptr, dgate_ptr, dup_ptr, dscale_ptr, peak_ptr, rows, gate_step, up_step, dgate_step,
    dup_step, beta, linear_beta, slope, linear_slope, blocks,
    H: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, BOUNDED: tl.constexpr, SCALED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(rows / BR), blocks of columns), or (ceil(rows / BR), 1) where SCALED: dscale needs whole rows.
    peak fp32 [2, SLOTS] of dgate and dup, or None."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    in_row = row < rows
    dscale = tl.zeros([BR], tl.float32)
    EACH: tl.constexpr = min(8, BR * BH)
    peak_gate = tl.zeros([BR * BH // EACH], tl.float32)
    peak_up = tl.zeros([BR * BH // EACH], tl.float32)
    if SCALED:
        scale = tl.load(scale_ptr + row, mask=in_row, other=0.0).to(tl.float32)
    for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
        column = block * BH + tl.arange(0, BH)
        inside = in_row[:, None] & (column < H)[None, :]
        g = tl.load(gate_ptr + row[:, None] * gate_step + column[None, :], mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up_ptr + row[:, None] * up_step + column[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * H + column[None, :], mask=inside, other=0.0).to(tl.float32)
        t, s = _gate(g, slope, HALF)
        act = beta * t * s
        bounded, steep = u, 1.0
        if BOUNDED:
            tu = _saturate(u, linear_slope)
            bounded, steep = linear_beta * tu, 1.0 - tu * tu
        if SCALED:
            dscale += tl.sum(dy * act * bounded, 1)
            dy *= scale[:, None]
        dg = dy * bounded * s * ((1.0 - t * t) + beta * t * (1.0 - s))
        du = dy * act * steep
        kind = dgate_ptr.dtype.element_ty
        tl.store(dgate_ptr + row[:, None] * dgate_step + column[None, :], dg.to(kind), mask=inside)
        tl.store(dup_ptr + row[:, None] * dup_step + column[None, :], du.to(kind), mask=inside)
        if peak_ptr is not None:  # outside both are zero
            peak_gate = tl.maximum(peak_gate, neighbours_peak(dg, EACH))
            peak_up = tl.maximum(peak_up, neighbours_peak(du, EACH))
    if peak_ptr is not None:
        raise_peak(peak_ptr, peak_gate, dgate_ptr.dtype.element_ty)
        raise_peak(peak_ptr + SLOTS, peak_up, dup_ptr.dtype.element_ty)
    if SCALED:
        tl.store(dscale_ptr + row, dscale, mask=in_row)


def _tile(H: int) -> tuple[int, int]:
    """Columns and rows of a tile; whole tiles make up a row where its width allows."""
    power = H & -H
    BH = min(COLUMNS, power if power >= 128 else triton.next_power_of_2(H))
    return BH, max(1, COLUMNS // BH)


def _slopes(beta: float, linear_beta: float | None) -> tuple[float, float, float, float]:
    """The bounds and their inverses: a kernel would divide every number."""
    linear = 1.0 if linear_beta is None else linear_beta
    return beta, linear, 1.0 / beta, 1.0 / linear


def forward_triton(gate: Tensor, up: Tensor, scale: Tensor | None, beta: float, linear_beta: float | None) -> Tensor:
    """gate, up [N, h] with a last stride of one. The peak of the output is noted, but for scaled rows."""
    rows, H = gate.shape
    y = torch.empty(rows, H, dtype=gate.dtype, device=gate.device)
    peak = _slots(y, scale)
    if y.numel():
        BH, BR = _tile(H)
        forward_kernel[(triton.cdiv(rows, BR), triton.cdiv(H, BH))](
            gate, up, gate if scale is None else scale, y, peak, rows, gate.stride(0), up.stride(0),
            *_slopes(beta, linear_beta), H=H, BH=BH, BR=BR, BOUNDED=linear_beta is not None, SCALED=scale is not None,
            HALF=beta == 4.0, num_warps=4,
        )  # fmt: skip
    PEAKS.note(y, peak)
    return y


def _slots(x: Tensor, scale: Tensor | None, *tensors: int) -> Tensor | None:
    """Where rows are scaled they are experts', whose products ask for no peak."""
    return PEAKS.slots(x.device, *tensors) if scale is None else None


def backward_triton(
    gate: Tensor, up: Tensor, scale: Tensor | None, dy: Tensor, dgate: Tensor, dup: Tensor,
    peak: Tensor | None, beta: float, linear_beta: float | None,
) -> Tensor | None:  # fmt: skip
    """Fills dgate and dup [N, h], and their peaks fp32 [2, SLOTS] unless None; returns dscale fp32 [N]."""
    rows, H = gate.shape
    dscale = None if scale is None else torch.empty(rows, dtype=torch.float32, device=gate.device)
    if gate.numel():
        BH, BR = _tile(H)
        blocks = triton.cdiv(H, BH)
        backward_kernel[(triton.cdiv(rows, BR), blocks if scale is None else 1)](
            gate, up, gate if scale is None else scale, dy, dgate, dup, dy if dscale is None else dscale, peak, rows,
            gate.stride(0), up.stride(0), dgate.stride(0), dup.stride(0), *_slopes(beta, linear_beta), blocks, H=H, BH=BH,
            BR=BR, BOUNDED=linear_beta is not None, SCALED=scale is not None, HALF=beta == 4.0, num_warps=4,
        )  # fmt: skip
    return dscale


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class TritonSiTU(torch.autograd.Function):
    """gate, up [N, h], scale [N] or None -> [N, h]."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, scale: Tensor | None, beta: float, linear_beta: float | None
    ) -> Tensor:
        ctx.save_for_backward(gate, up, scale)
        ctx.betas = beta, linear_beta
        return forward_triton(_rows(gate), _rows(up), scale, beta, linear_beta)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        gate, up, scale = ctx.saved_tensors
        dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        dup = torch.empty_like(dgate)
        peak = _slots(dy, scale, 2)
        dscale = backward_triton(_rows(gate), _rows(up), scale, dy.contiguous(), dgate, dup, peak, *ctx.betas)
        PEAKS.note_each([dgate, dup], peak)
        return dgate, dup, None if dscale is None or scale is None else dscale.to(scale.dtype), None, None


class TritonSiTUPacked(torch.autograd.Function):
    """x [N, 2h], gate then up, scale [N] or None -> [N, h]; the gradient of x is written in place, never joined.

    Of that gradient no peak is found."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, beta: float, linear_beta: float | None) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.betas = beta, linear_beta
        gate, up = _rows(x).chunk(2, -1)
        return forward_triton(gate, up, scale, beta, linear_beta)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, scale = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        (gate, up), (dgate, dup) = _rows(x).chunk(2, -1), dx.chunk(2, -1)
        dscale = backward_triton(gate, up, scale, dy.contiguous(), dgate, dup, None, *ctx.betas)
        return dx, None if dscale is None or scale is None else dscale.to(scale.dtype), None, None
