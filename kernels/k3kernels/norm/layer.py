"""The RMS norm of layers and latents, with gradients: fp32 statistics, rounded to the input's dtype before the weight."""

import torch
from torch import Tensor

from k3kernels.checks import check_same_device, check_tensor, choose_backend

BACKENDS = ("auto", "torch", "triton")


def layer_rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., d], weight [d]."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def layer_rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-5, backend: str = "auto") -> Tensor:
    """weight * round(x / sqrt(mean x^2 + eps)), as the released K3 code rounds.

    Args:
        x: [..., d]; fp32, bf16, fp16 (fp64: torch only). Rows may be strided.
        weight: [d], in the dtype of x.
        eps: inside the root, positive.
        backend: auto (Triton on CUDA, else torch), torch or triton.

    Returns:
        [..., d] like x. Gradients flow to both tensors; Triton keeps only these.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    if not isinstance(x, Tensor) or x.dim() < 1:
        raise TypeError(f"x: expected a tensor [..., d], got {x!r}")
    check_tensor("x", x, (None,) * x.dim(), "[..., d]")
    check_tensor("weight", weight, (x.shape[-1],), "[d]")
    if weight.dtype != x.dtype:
        raise TypeError(f"weight: expected {x.dtype} like x, got {weight.dtype}")
    if not eps > 0:
        raise ValueError(f"eps: expected a positive number, got {eps}")
    check_same_device("x", x, {"weight": weight})
    if choose_backend(backend, BACKENDS, x) == "triton":
        from k3kernels.norm.triton_layer import TritonRMSNorm

        return TritonRMSNorm.apply(x, weight, eps)
    return layer_rms_norm_torch(x, weight, eps)
