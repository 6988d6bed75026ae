"""Decoding: one token, or a few, at a time, with the state updated in place.

The same recurrence as `k3kernels.kda.kda`, for batches of sequences that each advance by the same few tokens. The time
is that of reading and writing the fp32 state, so nothing is chunked. No gradients.
"""

import torch
from torch import Tensor

from k3kernels.checks import check_bound, check_choice
from k3kernels.kda.naive import compute_dtype, l2_normalize, log_decay
from k3kernels.kda.ops import check_arguments

BACKENDS = ("auto", "torch", "triton")


@torch.no_grad()
def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    bound: float | None = -5.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Advances every sequence of a batch by T tokens (usually 1) and updates `state` in place.

    Args:
        q, k, v, z, beta, A_log, dt_bias, bound, scale: as in `k3kernels.kda.kda`; T is small.
        state: [B, HV, K, V], fp32 (or fp64 on the torch backend); may be a strided view into a cache.
        backend: auto (Triton on CUDA, else torch), torch or triton.

    Returns:
        o [B, T, HV, V] in v's dtype.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    check_arguments(q, k, v, z, beta, A_log, dt_bias, state, None, state_name="state")
    if state.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"state: expected float32 (the state is kept in full precision), got {state.dtype}")
    bound = check_bound(bound)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    check_choice("backend", backend, BACKENDS)
    if backend == "triton" or (backend == "auto" and q.is_cuda and state.dtype == torch.float32):
        from k3kernels.kda.recurrent_triton import decode_triton  # imports triton, which CPU users may lack

        return decode_triton(q, k, v, z, beta, A_log, dt_bias, state, bound, scale)
    return decode_torch(q, k, v, z, beta, A_log, dt_bias, state, bound, scale)


def decode_torch(
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
    """`kda_decode` in plain torch; arguments already checked."""
    dtype = compute_dtype(q, k, v, z, beta, A_log, dt_bias, state)
    q_, k_, v_, z_, beta_, A_, bias_ = (x.to(dtype) for x in (q, k, v, z, beta, A_log, dt_bias))
    group = v.shape[2] // q.shape[2]
    q_, k_ = ((l2_normalize(x)).repeat_interleave(group, dim=2) for x in (q_, k_))
    decay, b = log_decay(z_, A_, bias_, bound).exp(), torch.sigmoid(beta_)
    o = torch.empty_like(v_, memory_format=torch.contiguous_format)
    for t in range(q.shape[1]):
        state.mul_(decay[:, t].unsqueeze(-1))
        read = torch.matmul(k_[:, t].unsqueeze(-2), state).squeeze(-2)
        u = b[:, t].unsqueeze(-1) * (v_[:, t] - read)
        state.addcmul_(k_[:, t].unsqueeze(-1), u.unsqueeze(-2))
        o[:, t] = torch.matmul(q_[:, t].unsqueeze(-2), state).squeeze(-2)
    return o.mul_(scale).to(v.dtype)
