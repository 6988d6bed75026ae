"""RMS norm without gradients, for decoding: statistics in fp32, rounded to x's dtype before the weight."""

import torch
from torch import Tensor

from k3kernels.checks import check_same_device, check_tensor, choose_backend

BACKENDS = ("auto", "torch", "triton")


@torch.no_grad()
def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-5, backend: str = "auto") -> Tensor:
    """weight * round(x / rms(x)), as the released model rounds it.

    Args:
        x: [N, C]; fp32, bf16 or fp16 (fp64 on torch). weight: [C] in x's dtype. eps: inside the root.
        backend: auto (Triton on CUDA, else torch), torch or triton.

    Returns:
        y like x. No gradients.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    check_tensor("x", x, (None, None), "[N, C]")
    check_tensor("weight", weight, (x.shape[1],), "[C]")
    if weight.dtype != x.dtype:
        raise TypeError(f"weight: expected the dtype of x, {x.dtype}, got {weight.dtype}")
    check_same_device("x", x, {"weight": weight})
    if choose_backend(backend, BACKENDS, x) == "triton":
        from k3kernels.norm.triton_rms import rms_norm_triton  # imports triton, which CPU users may lack

        return rms_norm_triton(x, weight, eps)
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
