"""The gated delta rule one token at a time (Gated DeltaNet, arXiv 2412.06464).

S <- a S;  S <- S + k beta (v - S^T k)^T;  o = scale S^T q, with one decay a per head and token.
q and k are L2-normalised and beta is a sigmoid, as in KDA. Differentiable by autograd.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.kda.naive import MAX_A_LOG, compute_dtype, l2_normalize


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
    """Arguments as in `gated_delta`, already checked."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        pieces = [
            gated_delta_naive(
                q[:, a:b], k[:, a:b], v[:, a:b], z[:, a:b], beta[:, a:b], A_log, dt_bias, bound=bound, scale=scale,
                initial_state=None if initial_state is None else initial_state[n : n + 1],
            )
            for n, (a, b) in enumerate(zip(bounds, bounds[1:]))
        ]  # fmt: skip
        return torch.cat([o for o, _ in pieces], 1), torch.cat([S for _, S in pieces])
    dtype = compute_dtype(q, k, v, z, beta, A_log, dt_bias, initial_state)
    (B, T, H, K), (HV, V) = q.shape, v.shape[-2:]
    q_, k_ = (l2_normalize(x.to(dtype)).repeat_interleave(HV // H, dim=2) for x in (q, k))
    b = torch.sigmoid(beta.to(dtype)).unsqueeze(-1)
    decay = scalar_log_decay(z.to(dtype), A_log.to(dtype), dt_bias.to(dtype), bound).exp()
    S = q_.new_zeros(B, HV, K, V) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(T):
        S = decay[:, t, :, None, None] * S
        u = b[:, t] * (v[:, t].to(dtype) - torch.einsum("bhk,bhkv->bhv", k_[:, t], S))
        S = S + k_[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q_[:, t], S))
    o = torch.stack(outputs, 1) if outputs else v.new_zeros(B, 0, HV, V)
    return o.to(v.dtype), S
