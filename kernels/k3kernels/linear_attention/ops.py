"""The public entry of linear attention."""

from torch import Tensor

from k3kernels.checks import check_choice, check_qkv
from k3kernels.linear_attention.chunk_torch import linear_attention_torch
from k3kernels.linear_attention.naive import linear_attention_naive

BACKENDS = ("auto", "naive", "torch")


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Causal linear attention, S <- S + k v^T, o = scale S^T q, with q and k L2-normalised as in KDA.

    No decay, no erase and no running normaliser (the layer's gated RMS norm takes its place).

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V], HV a multiple of H. Any strides.
        scale: of q after its normalisation; None means K^-0.5.
        initial_state: [N, HV, K, V]; zeros when None.
        cu_seqlens: integer [N+1], documents of a packed stream with B = 1; keep it on the CPU to avoid a wait.
        output_final_state: also return the state after each document.
        backend: auto (chunked torch), naive or torch; both run on CPU and GPU tensors.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state fp32 [N, HV, K, V] or None. All sums are fp32 (fp64 for fp64
        inputs). Gradients flow to q, k, v and initial_state.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    check_qkv(q, k, v, initial_state, cu_seqlens)
    check_choice("backend", backend, BACKENDS)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    implementation = linear_attention_naive if backend == "naive" else linear_attention_torch
    o, final = implementation(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return o, final if output_final_state else None
