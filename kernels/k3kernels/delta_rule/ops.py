"""The public entry of the delta rule; the chunked form is KDA's with every gate open."""

import torch
from torch import Tensor

from k3kernels.checks import check_qkv, check_same_device, check_tensor
from k3kernels.delta_rule.naive import delta_rule_naive
from k3kernels.kda.chunk_torch import chunked_delta
from k3kernels.kda.naive import compute_dtype
from k3kernels.kda.ops import kda, pick_backend

# A raw gate so low that sigmoid gives exactly 0 in every precision: log decay 0.
OPEN_GATE = -1e4


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The delta rule, S <- S + k b (v - S^T k)^T, o = scale S^T q, b = sigmoid(beta), q and k L2-normalised.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H. beta: logits [B, T, HV]. Any strides.
        scale: of q after its normalisation; None means K^-0.5.
        initial_state: [N, HV, K, V]; zeros when None.
        cu_seqlens: integer [N+1], documents of a packed stream with B = 1.
        output_final_state: also return the state after each document.
        backend: auto (Triton on CUDA, else torch), naive, torch or triton.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state fp32 [N, HV, K, V] or None. Gradients flow to every tensor
        except cu_seqlens.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    check_qkv(q, k, v, initial_state, cu_seqlens)
    B, T, HV, _ = v.shape
    K = q.shape[-1]
    check_tensor("beta", beta, (B, T, HV), "[B, T, HV]")
    check_same_device("q", q, {"beta": beta})
    scale = K**-0.5 if scale is None else float(scale)
    backend = pick_backend(backend, q, k, v)
    final: Tensor | None
    if backend == "naive":
        o, final = delta_rule_naive(q, k, v, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    elif backend == "triton":
        z = q.new_zeros(1, 1, HV, K).expand(B, T, HV, K)
        A_log = torch.zeros(HV, device=q.device)
        dt_bias = torch.full((HV, K), OPEN_GATE, device=q.device)
        o, final = kda(
            q, k, v, z, beta, A_log, dt_bias, bound=-5.0, scale=scale, initial_state=initial_state,
            cu_seqlens=cu_seqlens, output_final_state=output_final_state, backend="triton",
        )  # fmt: skip
    else:
        dtype = compute_dtype(q, k, v, beta, initial_state)
        g = q.new_zeros(1, 1, 1, 1, dtype=dtype).expand(B, T, HV, K)
        o, final = chunked_delta(
            q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
            bound=-5.0,  # any bound holds for gates of zero, and a bound allows whole tiles
        )  # fmt: skip
    return o, final if output_final_state else None
