"""The decode step of three short convolutions on a GPU, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.conv.step import Three


@triton.jit
def _one(x_ptr, w_ptr, s_ptr, y_ptr, C, x_sb, W: tl.constexpr, BC: tl.constexpr):
    batch = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = channel < C
    x = tl.load(x_ptr + batch * x_sb + channel, mask=inside, other=0.0)
    total = x.to(tl.float32) * tl.load(w_ptr + channel * W + W - 1, mask=inside, other=0.0).to(tl.float32)
    at = s_ptr + (batch * C + channel) * (W - 1)
    for tap in tl.static_range(W - 1):
        before = tl.load(at + tap, mask=inside, other=0.0)
        total += before.to(tl.float32) * tl.load(w_ptr + channel * W + tap, mask=inside, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(at + tap - 1, before, mask=inside)
    tl.store(at + W - 2, x, mask=inside)
    y = total / (1.0 + tl.exp(-total))
    tl.store(y_ptr + batch * C + channel, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def step_kernel(
    q_ptr, k_ptr, v_ptr, wq_ptr, wk_ptr, wv_ptr, sq_ptr, sk_ptr, sv_ptr, y_ptr, C, q_sb, k_sb, v_sb, y_s,
    W: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Grid (B, ceil(C / BC), 3). States [B, C, W-1], y [3, B, C], both contiguous."""
    if tl.program_id(2) == 0:
        _one(q_ptr, wq_ptr, sq_ptr, y_ptr, C, q_sb, W, BC)
    elif tl.program_id(2) == 1:
        _one(k_ptr, wk_ptr, sk_ptr, y_ptr + y_s, C, k_sb, W, BC)
    else:
        _one(v_ptr, wv_ptr, sv_ptr, y_ptr + 2 * y_s, C, v_sb, W, BC)


def step_qkv_triton(xs: Three, weights: Three, states: Three) -> Three:
    """`k3kernels.conv.step.short_convolution_step_qkv` on Triton; arguments already checked."""
    if any(s.dtype != xs[0].dtype or not s.is_contiguous() for s in states):
        raise ValueError("states: Triton needs contiguous states in the dtype of xs")
    xs = tuple(x if x.stride(1) == 1 else x.contiguous() for x in xs)  # type: ignore[assignment]
    weights = tuple(w.contiguous() for w in weights)  # type: ignore[assignment]
    B, C = xs[0].shape
    y: Tensor = torch.empty(3, B, C, dtype=xs[0].dtype, device=xs[0].device)
    step_kernel[(B, triton.cdiv(C, 256), 3)](
        *xs, *weights, *states, y, C, xs[0].stride(0), xs[1].stride(0), xs[2].stride(0), B * C,
        W=weights[0].shape[1], BC=256, num_warps=4,
    )  # fmt: skip
    return y[0], y[1], y[2]
