"""The gated delta rule one token at a time (Gated DeltaNet, arXiv 2412.06464).

S <- a S;  S <- S + k beta (v - S^T k)^T;  o = scale S^T q, with one decay a per head and token.
q and k are L2-normalised and beta is a sigmoid, as in KDA, whose recurrence this is with equal channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.kda.naive import MAX_A_LOG, compute_dtype, l2_normalize, naive_recurrence


def scalar_log_decay(z: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float | None) -> Tensor:
    """Log decay [..., HV]: -exp(A_log) softplus(z + dt_bias), or bound * sigmoid(exp(A_log) (z + dt_bias))."""
    rate = A_log.clamp(max=MAX_A_LOG).exp()
    x = z + dt_bias
    return -rate * F.softplus(x) if bound is None else bound * torch.sigmoid(rate * x)


def gated_delta_naive(
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
) -> tuple[Tensor, Tensor]:
    """Arguments as in `gated_delta`, already checked; differentiable by autograd."""
    dtype = compute_dtype(q, k, v, z, beta, A_log, dt_bias, initial_state)
    o, S = naive_recurrence(
        l2_normalize(q.to(dtype)),
        l2_normalize(k.to(dtype)),
        v.to(dtype),
        scalar_log_decay(z.to(dtype), A_log.to(dtype), dt_bias.to(dtype), bound).unsqueeze(-1),
        torch.sigmoid(beta.to(dtype)),
        scale=scale,
        initial_state=None if initial_state is None else initial_state.to(dtype),
        cu_seqlens=cu_seqlens,
    )
    return o.to(v.dtype), S
