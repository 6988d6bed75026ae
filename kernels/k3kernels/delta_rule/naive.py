"""The delta rule one token at a time: S <- S + k beta (v - S^T k)^T, o = scale S^T q (DeltaNet, arXiv 2406.06484).

q and k are L2-normalised and beta is a sigmoid, as in KDA. Differentiable by autograd.
"""

import torch
from torch import Tensor

from k3kernels.kda.naive import compute_dtype, l2_normalize


def delta_rule_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments as in `delta_rule`, already checked."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        pieces = [
            delta_rule_naive(
                q[:, a:b], k[:, a:b], v[:, a:b], beta[:, a:b], scale=scale,
                initial_state=None if initial_state is None else initial_state[n : n + 1],
            )
            for n, (a, b) in enumerate(zip(bounds, bounds[1:]))
        ]  # fmt: skip
        return torch.cat([o for o, _ in pieces], 1), torch.cat([S for _, S in pieces])
    dtype = compute_dtype(q, k, v, beta, initial_state)
    (B, T, H, K), (HV, V) = q.shape, v.shape[-2:]
    q_, k_ = (l2_normalize(x.to(dtype)).repeat_interleave(HV // H, dim=2) for x in (q, k))
    b = torch.sigmoid(beta.to(dtype)).unsqueeze(-1)
    S = q_.new_zeros(B, HV, K, V) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(T):
        u = b[:, t] * (v[:, t].to(dtype) - torch.einsum("bhk,bhkv->bhv", k_[:, t], S))
        S = S + k_[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q_[:, t], S))
    o = torch.stack(outputs, 1) if outputs else v.new_zeros(B, 0, HV, V)
    return o.to(v.dtype), S
