"""The convolution's decoding step on a GPU: one launch reads the new inputs and the state once, and writes both back."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.conv.triton_conv import _sigmoid, _tap

CHANNELS = 512


@triton.jit
def _slot(state_at, s_sw, inside, lag: tl.constexpr, W: tl.constexpr):
    """The input `lag` tokens before the first new one; zero beyond the width."""
    x = tl.zeros([inside.shape[0]], tl.float32)
    if lag < W:
        x = tl.load(state_at + (W - 1 - lag) * s_sw, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _keep(state_at, s_sw, inside, x, lag: tl.constexpr, W: tl.constexpr):
    if lag < W:
        tl.store(state_at + (W - 1 - lag) * s_sw, x.to(state_at.dtype.element_ty), mask=inside)


@triton.jit
def step_kernel(
    x_ptr, weight_ptr, state_ptr, y_ptr, T, C, x_sb, x_st, s_sb, s_sc, s_sw, W: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Grid (B, channel blocks). x [B, T, C] with unit stride over C, y contiguous, state [B, C, W-1] with any strides."""
    batch = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = channel < C
    tap0, tap1 = _tap(weight_ptr, channel, inside, 0, W), _tap(weight_ptr, channel, inside, 1, W)
    tap2, tap3 = _tap(weight_ptr, channel, inside, 2, W), _tap(weight_ptr, channel, inside, 3, W)
    state_at = state_ptr + batch * s_sb + channel.to(tl.int64) * s_sc
    p1, p2 = _slot(state_at, s_sw, inside, 1, W), _slot(state_at, s_sw, inside, 2, W)
    p3 = _slot(state_at, s_sw, inside, 3, W)
    for t in range(T):
        x = tl.load(x_ptr + batch * x_sb + t * x_st + channel, mask=inside, other=0.0).to(tl.float32)
        acc = tap0 * x + tap1 * p1 + tap2 * p2 + tap3 * p3
        tl.store(y_ptr + (batch * T + t) * C + channel, (acc * _sigmoid(acc)).to(y_ptr.dtype.element_ty), mask=inside)
        p3 = p2
        p2 = p1
        p1 = x
    _keep(state_at, s_sw, inside, p1, 1, W)
    _keep(state_at, s_sw, inside, p2, 2, W)
    _keep(state_at, s_sw, inside, p3, 3, W)


def short_convolution_step_triton(x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """`k3kernels.conv.short_convolution_step` on Triton; arguments already checked."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    B, T, C = x.shape
    y = torch.empty(B, T, C, dtype=x.dtype, device=x.device)
    if y.numel():
        BC = min(CHANNELS, triton.next_power_of_2(C))
        step_kernel[(B, triton.cdiv(C, BC))](
            x, weight.contiguous(), state, y, T, C, x.stride(0), x.stride(1), *state.stride(), W=weight.shape[1], BC=BC,
            num_warps=4,
        )  # fmt: skip
    return y
