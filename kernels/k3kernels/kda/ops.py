"""The public entry of Kimi Delta Attention: checks the arguments, picks a backend."""

from collections.abc import Callable

import torch
from torch import Tensor

from k3kernels.checks import (
    check_bound,
    check_choice,
    check_cu_seqlens,
    check_heads,
    check_same_device,
    check_tensor,
)
from k3kernels.kda.chunk_torch import kda_torch
from k3kernels.kda.naive import kda_naive

BACKENDS = ("auto", "naive", "torch", "triton")
TRITON_SIZES = (16, 32, 64, 128, 256)
TRITON_DTYPES = (torch.bfloat16, torch.float32)


def pick_backend(backend: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    """The implementation to run: auto means Triton on CUDA tensors that it can take, chunked torch for all others."""
    check_choice("backend", backend, BACKENDS)
    if backend not in ("auto", "triton"):
        return backend
    K, V = q.shape[-1], v.shape[-1]
    fits = K in TRITON_SIZES and V in TRITON_SIZES and q.dtype in TRITON_DTYPES and q.dtype == k.dtype == v.dtype
    if backend == "triton" and not fits:
        raise ValueError(
            f"backend: triton takes K and V in {TRITON_SIZES} and q, k, v all bfloat16 or all float32, got K = {K}, "
            f"V = {V}, {q.dtype}, {k.dtype}, {v.dtype}; use backend='torch'"
        )
    return "triton" if backend == "triton" or (q.is_cuda and fits) else "torch"


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_name: str = "initial_state",
) -> None:
    """Shapes, dtypes and devices of all tensors; raises ValueError or TypeError naming the argument."""
    check_tensor("q", q, (None,) * 4, "[B, T, H, K]")
    B, T, H, K = q.shape
    check_tensor("k", k, (B, T, H, K), "[B, T, H, K]")
    check_tensor("v", v, (B, T, None, None), "[B, T, HV, V]")
    HV, V = v.shape[-2:]
    check_heads(H, HV)
    check_tensor("z", z, (B, T, HV, K), "[B, T, HV, K]")
    check_tensor("beta", beta, (B, T, HV), "[B, T, HV]")
    check_tensor("A_log", A_log, (HV,), "[HV]")
    check_tensor("dt_bias", dt_bias, (HV, K), "[HV, K]")
    documents = B if cu_seqlens is None else check_cu_seqlens(cu_seqlens, B, T)
    if initial_state is not None:
        check_tensor(state_name, initial_state, (documents, HV, K, V), "[N, HV, K, V]")
    others = {"k": k, "v": v, "z": z, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, state_name: initial_state}
    check_same_device("q", q, others)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    bound: float | None = -5.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention with all that the layer fuses around it (Kimi K3 report Eq. 1-6, section 2.1.1).

    Per value head, with q, k divided by sqrt(sum x^2 + 1e-6), b = sigmoid(beta), and the log decay
    g = bound * sigmoid(exp(A_log) (z + dt_bias)), or -exp(A_log) softplus(z + dt_bias) without a bound:

        S <- diag(e^g) S;   S <- S + k b (v - S^T k)^T;   o = scale S^T q

    Args:
        q, k: [B, T, H, K]. Any strides, here and below; fp32, bf16, fp16 (fp64 on the naive and torch backends).
        v: [B, T, HV, V], HV a multiple of H.
        z: raw gate [B, T, HV, K].
        beta: logits [B, T, HV].
        A_log: [HV]; dt_bias: [HV, K]. Values of A_log above 60 act as 60.
        bound: lower bound of g per step, in [-5.9, 0), or None.
        scale: of q after its normalisation; None means K^-0.5.
        initial_state: [N, HV, K, V], fp32; zeros when None.
        cu_seqlens: int32 or int64 [N+1], documents of a packed stream with B = 1; empty documents are allowed and
            pass their state through. Values are checked when the tensor lives on the CPU.
        output_final_state: also return the state after each document.
        backend: auto (Triton on CUDA, else torch), naive, torch or triton (K and V powers of two from 16 to 256; q, k
            and v all bf16 or all fp32; under auto other inputs run on torch).

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state fp32 [N, HV, K, V] or None.
        Gradients flow to every tensor except cu_seqlens. The state and all sums are fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    check_arguments(q, k, v, z, beta, A_log, dt_bias, initial_state, cu_seqlens)
    bound = check_bound(bound)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    backend = pick_backend(backend, q, k, v)
    implementation: Callable[..., tuple[Tensor, Tensor | None]]
    if backend == "triton":
        from k3kernels.kda.triton.api import kda_triton as implementation  # imports triton, which CPU users may lack

        initial_state = None if initial_state is None else initial_state.float()
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(q.device)
    else:
        implementation = kda_naive if backend == "naive" else kda_torch
    return implementation(
        q, k, v, z, beta, A_log, dt_bias, bound=bound, scale=scale, initial_state=initial_state,
        cu_seqlens=cu_seqlens, output_final_state=output_final_state,
    )  # fmt: skip
