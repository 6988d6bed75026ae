"""Kimi Delta Attention one token at a time: the readable truth, and the oracle of every faster form.

Kimi K3 report (arXiv 2607.24653) Eq. 1-2 and section 2.1.1. Differentiable by autograd; computes in fp64 when any
input is fp64, else in fp32. Slow by design.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6
# exp(60) = 1e26 already makes any gate a step function; larger values would only turn 0 * inf into NaN.
MAX_A_LOG = 60.0


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 if any of the tensors is, else fp32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension; the epsilon is inside the root."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def log_decay(z: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float | None) -> Tensor:
    """Log decay g <= 0 from the raw gate z [..., HV, K], A_log [HV], dt_bias [HV, K].

    bounded: bound * sigmoid(exp(A_log) * (z + dt_bias)), in (bound, 0)
    unbounded (bound None): -exp(A_log) * softplus(z + dt_bias)
    """
    rate = A_log.clamp(max=MAX_A_LOG).exp().unsqueeze(-1)
    x = z + dt_bias
    return -rate * F.softplus(x) if bound is None else bound * torch.sigmoid(rate * x)


def naive_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence alone, on activated inputs: q, k already normalised, g the log decay, beta in [0, 1].

    S <- diag(e^g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q

    Shapes: q, k [B,T,H,K]; v [B,T,HV,V]; g [B,T,HV,K], or [B,T,HV,1] for one decay a head; beta [B,T,HV]. Returns
    o [B,T,HV,V], final state [N,HV,K,V].
    """
    if cu_seqlens is not None:
        outputs, states = [], []
        bounds = cu_seqlens.tolist()
        for n, (start, end) in enumerate(zip(bounds, bounds[1:])):
            piece = slice(start, end)
            o, S = naive_recurrence(
                q[:, piece], k[:, piece], v[:, piece], g[:, piece], beta[:, piece], scale=scale,
                initial_state=None if initial_state is None else initial_state[n : n + 1],
            )  # fmt: skip
            outputs.append(o)
            states.append(S)
        return torch.cat(outputs, 1), torch.cat(states, 0)
    B, T, H, K = q.shape
    HV, V = v.shape[-2:]
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    S = v.new_zeros(B, HV, K, V) if initial_state is None else initial_state
    outputs = []
    for t in range(T):
        S = S * g[:, t].exp().unsqueeze(-1)
        read = torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - read)
        S = S + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return (torch.stack(outputs, 1) if outputs else v.new_zeros(B, 0, HV, V)), S


def kda_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    bound: float | None,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The whole op token by token; arguments as in `k3kernels.kda.kda`, already checked."""
    dtype = compute_dtype(q, k, v, z, beta, A_log, dt_bias, initial_state)
    q_, k_, v_, z_, beta_, A_, bias_ = (x.to(dtype) for x in (q, k, v, z, beta, A_log, dt_bias))
    o, S = naive_recurrence(
        l2_normalize(q_),
        l2_normalize(k_),
        v_,
        log_decay(z_, A_, bias_, bound),
        torch.sigmoid(beta_),
        scale=scale,
        initial_state=None if initial_state is None else initial_state.to(dtype),
        cu_seqlens=cu_seqlens,
    )
    return o.to(v.dtype), S if output_final_state else None
