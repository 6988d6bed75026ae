"""Linear attention one token at a time: S <- S + k v^T, o = scale S^T q (Katharopoulos et al., arXiv 2006.16236).

Feature map: q and k divided by their L2 norm, as in KDA, so that the rungs of the ladder differ in the state update
only. No running normaliser: the layer's gated RMS norm takes that place.
"""

import torch
from torch import Tensor

from k3kernels.kda.naive import compute_dtype, l2_normalize


def linear_attention_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments as in `linear_attention`, already checked; differentiable by autograd."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        pieces = [
            linear_attention_naive(
                q[:, a:b], k[:, a:b], v[:, a:b], scale=scale,
                initial_state=None if initial_state is None else initial_state[n : n + 1],
            )
            for n, (a, b) in enumerate(zip(bounds, bounds[1:]))
        ]  # fmt: skip
        return torch.cat([o for o, _ in pieces], 1), torch.cat([S for _, S in pieces])
    dtype = compute_dtype(q, k, v, initial_state)
    (B, T, H, K), (HV, V) = q.shape, v.shape[-2:]
    q_, k_ = (l2_normalize(x.to(dtype)).repeat_interleave(HV // H, dim=2) for x in (q, k))
    S = q_.new_zeros(B, HV, K, V) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(T):
        S = S + k_[:, t].unsqueeze(-1) * v[:, t].to(dtype).unsqueeze(-2)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q_[:, t], S))
    o = torch.stack(outputs, 1) if outputs else v.new_zeros(B, 0, HV, V)
    return o.to(v.dtype), S
