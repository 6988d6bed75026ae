"""The decode step on a GPU: each program holds a [K, BV] slice of one head's state, and walks over the few tokens.

Bound by reading and writing the fp32 state once (2 * 4 * K * V bytes per head and call, however many tokens).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.kda.triton.common import decay_rate, log2_decay, sigmoid


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, z_ptr, beta_ptr, A_log_ptr, bias_ptr, state_ptr, o_ptr,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, z_sb, z_st, z_sh, b_sb, b_st, b_sh, s_sb, s_sh, s_sk,
    T, HV, scale, bound,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Grid (B * HV, V / BV), the long axis first since only that one may exceed 65535.

    o is [B, T, HV, V] contiguous; BK is the power of two that holds K.
    """
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    row = tl.arange(0, BK)
    batch = (tl.program_id(0) // HV).to(tl.int64)
    head = (tl.program_id(0) % HV).to(tl.int64)
    in_v, in_k = column < V, row < K
    state_at = state_ptr + batch * s_sb + head * s_sh + row[:, None] * s_sk + column[None, :]
    inside = in_k[:, None] & in_v[None, :]
    S = tl.load(state_at, mask=inside, other=0.0)
    rate = decay_rate(tl.load(A_log_ptr + head).to(tl.float32))
    bias = tl.load(bias_ptr + head * K + row, mask=in_k, other=0.0).to(tl.float32)
    key_head = head // GROUP
    for t in range(T):
        q = tl.load(q_ptr + batch * q_sb + t * q_st + key_head * q_sh + row, mask=in_k, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + batch * k_sb + t * k_st + key_head * k_sh + row, mask=in_k, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + batch * v_sb + t * v_st + head * v_sh + column, mask=in_v, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + batch * z_sb + t * z_st + head * z_sh + row, mask=in_k, other=0.0).to(tl.float32)
        beta = sigmoid(tl.load(beta_ptr + batch * b_sb + t * b_st + head * b_sh).to(tl.float32))
        q = q * (scale / tl.sqrt(tl.sum(q * q) + 1e-6))
        k = k / tl.sqrt(tl.sum(k * k) + 1e-6)
        S = S * tl.exp2(log2_decay(z + bias, rate, bound, BOUNDED))[:, None]
        u = beta * (v - tl.sum(k[:, None] * S, 0))
        o = tl.sum(q[:, None] * S, 0) + tl.sum(q * k) * u  # of the state before the update, so that no sum waits for u
        S = S + k[:, None] * u[None, :]
        o_at = o_ptr + ((batch * T + t) * HV + head) * V + column
        tl.store(o_at, o.to(o_ptr.dtype.element_ty), mask=in_v)
    tl.store(state_at, S, mask=inside)


def tile(BK: int, V: int) -> tuple[int, int]:
    """Value columns and warps of a program."""
    return min(max(16, triton.next_power_of_2(V)), max(16, 4096 // BK)), 4


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def decode_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    bound: float | None,
    scale: float,
) -> Tensor:
    """`k3kernels.kda.kda_decode` on Triton; arguments already checked. state: fp32, unit stride over V."""
    if state.dtype != torch.float32 or state.stride(-1) != 1:
        raise ValueError(f"state: Triton needs float32 with unit stride over V, got {state.dtype}, {state.stride()}")
    (B, T, H, K), (HV, V) = q.shape, v.shape[-2:]
    q, k, v, z = (_unit_stride(x) for x in (q, k, v, z))
    A_log, dt_bias = A_log.contiguous(), dt_bias.contiguous()
    o = torch.empty(B, T, HV, V, dtype=v.dtype, device=v.device)
    if o.numel() == 0:
        return o
    BK = max(16, triton.next_power_of_2(K))
    BV, warps = tile(BK, V)
    decode_kernel[(B * HV, triton.cdiv(V, BV))](
        q, k, v, z, beta, A_log, dt_bias, state, o,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *z.stride()[:3], *beta.stride(), *state.stride()[:3],
        T, HV, scale, -1.0 if bound is None else bound,
        GROUP=HV // H, K=K, V=V, BK=BK, BV=BV, BOUNDED=bound is not None, num_warps=warps,
    )  # fmt: skip
    return o
