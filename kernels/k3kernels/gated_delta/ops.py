"""The public entry of the gated delta rule; the chunked form is KDA's with one gate for all channels of a head."""

from torch import Tensor

from k3kernels.checks import check_bound, check_qkv, check_same_device, check_tensor
from k3kernels.gated_delta.naive import gated_delta_naive, scalar_log_decay
from k3kernels.kda.chunk_torch import chunked_delta
from k3kernels.kda.naive import compute_dtype
from k3kernels.kda.ops import kda, pick_backend


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    bound: float | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule: KDA's recurrence with one log decay g per head and token.

    S <- e^g S;  S <- S + k b (v - S^T k)^T;  o = scale S^T q, with b = sigmoid(beta), q and k L2-normalised, and
    g = -exp(A_log) softplus(z + dt_bias) as in Gated DeltaNet, or KDA's bounded form when a bound is given.

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H. z: raw gate [B, T, HV]. beta: logits [B, T, HV].
        A_log, dt_bias: [HV]. Values of A_log above 60 act as 60.
        bound: None (softplus gate), or a lower bound of g in [-5.9, 0).
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
    check_tensor("z", z, (B, T, HV), "[B, T, HV]")
    check_tensor("beta", beta, (B, T, HV), "[B, T, HV]")
    check_tensor("A_log", A_log, (HV,), "[HV]")
    check_tensor("dt_bias", dt_bias, (HV,), "[HV]")
    check_same_device("q", q, {"z": z, "beta": beta, "A_log": A_log, "dt_bias": dt_bias})
    bound = check_bound(bound)
    scale = K**-0.5 if scale is None else float(scale)
    backend = pick_backend(backend, q, k, v)
    final: Tensor | None
    if backend == "naive":
        o, final = gated_delta_naive(
            q, k, v, z, beta, A_log, dt_bias, bound=bound, scale=scale, initial_state=initial_state,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
    elif backend == "triton":
        o, final = kda(
            q, k, v, z.unsqueeze(-1).expand(B, T, HV, K).contiguous(), beta, A_log,
            dt_bias.unsqueeze(-1).expand(HV, K).contiguous(), bound=bound, scale=scale, initial_state=initial_state,
            cu_seqlens=cu_seqlens, output_final_state=output_final_state, backend="triton",
        )  # fmt: skip
    else:
        dtype = compute_dtype(q, k, v, z, beta, A_log, dt_bias, initial_state)
        g = scalar_log_decay(z.to(dtype), A_log.to(dtype), dt_bias.to(dtype), bound)
        o, final = chunked_delta(
            q, k, v, g.unsqueeze(-1).expand(B, T, HV, K), beta, scale=scale, bound=bound, initial_state=initial_state,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
    return o, final if output_final_state else None
