"""The public entry of the gated RMS norm."""

from torch import Tensor

from k3kernels.checks import check_same_device, check_tensor, choose_backend
from k3kernels.norm.reference import gated_rms_norm_naive, gated_rms_norm_torch

BACKENDS = ("auto", "naive", "torch", "triton")


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, *, eps: float = 1e-5, backend: str = "auto") -> Tensor:
    """RMS norm over the last dimension, times weight, times sigmoid(gate) (Kimi K3 report Eq. 6).

    Args:
        o, gate: [..., V], one shape; fp32, bf16, fp16 or fp64.
        weight: [V], shared by all heads.
        eps: inside the root, positive.
        backend: auto (Triton on CUDA, else torch), naive, torch or triton.

    Returns:
        y like o; computed in fp32 (fp64 for fp64 inputs) and rounded once. Gradients flow to all three tensors.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    if not isinstance(o, Tensor) or o.dim() < 1:
        raise TypeError(f"o: expected a tensor [..., V], got {o!r}")
    check_tensor("o", o, (None,) * o.dim(), "[..., V]")
    check_tensor("gate", gate, tuple(o.shape), "[..., V]")
    check_tensor("weight", weight, (o.shape[-1],), "[V]")
    if not eps > 0:
        raise ValueError(f"eps: expected a positive number, got {eps}")
    check_same_device("o", o, {"gate": gate, "weight": weight})
    backend = choose_backend(backend, BACKENDS, o)
    if backend == "triton":
        from k3kernels.norm.triton_norm import gated_rms_norm_triton  # imports triton, which CPU users may lack

        return gated_rms_norm_triton(o, gate, weight, eps)
    return (gated_rms_norm_naive if backend == "naive" else gated_rms_norm_torch)(o, gate, weight, eps)
