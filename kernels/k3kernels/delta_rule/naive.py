"""The delta rule one token at a time: S <- S + k beta (v - S^T k)^T, o = scale S^T q (DeltaNet, arXiv 2406.06484).

q and k are L2-normalised and beta is a sigmoid, as in KDA, whose recurrence this is with every decay 1.
"""

import torch
from torch import Tensor

from k3kernels.kda.naive import compute_dtype, l2_normalize, naive_recurrence


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
    """Arguments as in `delta_rule`, already checked; differentiable by autograd."""
    dtype = compute_dtype(q, k, v, beta, initial_state)
    o, S = naive_recurrence(
        l2_normalize(q.to(dtype)),
        l2_normalize(k.to(dtype)),
        v.to(dtype),
        torch.zeros_like(beta, dtype=dtype).unsqueeze(-1),
        torch.sigmoid(beta.to(dtype)),
        scale=scale,
        initial_state=None if initial_state is None else initial_state.to(dtype),
        cu_seqlens=cu_seqlens,
    )
    return o.to(v.dtype), S
