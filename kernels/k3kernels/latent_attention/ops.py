"""One query of every head against a cache of latents that all heads share (MLA in its absorbed form)."""

import torch
from torch import Tensor

from k3kernels.checks import check_choice, check_same_device

BACKENDS = ("auto", "torch", "triton")


@torch.no_grad()
def latent_attention(
    q: Tensor, latents: Tensor, lengths: Tensor, *, values: int, scale: float, backend: str = "auto"
) -> Tensor:
    """softmax(scale q . c) over the first lengths[b] latents c of sequence b; the mix of their first `values` channels.

    Args:
        q: [B, H, D], queries carried into the latent space; bf16 or fp32.
        latents: [B, S, D] in q's dtype: `values` channels that are key and value, then channels of the key alone.
        lengths: int32 or int64 [B], 1 ... S, on q's device. Not read on the host, and not checked.
        backend: auto (Triton on CUDA, else torch), torch or triton.

    Returns:
        o [B, H, values] in q's dtype; scores, softmax and sums are fp32. No gradients.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    if q.dim() != 3 or latents.dim() != 3:
        raise ValueError(f"q, latents: expected [B, H, D] and [B, S, D], got {list(q.shape)} and {list(latents.shape)}")
    if q.dtype not in (torch.bfloat16, torch.float32) or latents.dtype != q.dtype:
        raise TypeError(f"q, latents: expected one dtype, bfloat16 or float32, got {q.dtype} and {latents.dtype}")
    if (latents.shape[0], latents.shape[2]) != (q.shape[0], q.shape[2]):
        raise ValueError(f"latents: expected [B, S, D] for q {list(q.shape)}, got {list(latents.shape)}")
    if not 1 <= values <= q.shape[2]:
        raise ValueError(f"values: expected 1 ... {q.shape[2]} channels, got {values}")
    if lengths.dtype not in (torch.int32, torch.int64) or tuple(lengths.shape) != (q.shape[0],):
        raise ValueError(f"lengths: expected integers [B] = [{q.shape[0]}], got {lengths.dtype} {list(lengths.shape)}")
    check_same_device("q", q, {"latents": latents, "lengths": lengths})
    check_choice("backend", backend, BACKENDS)
    if backend == "triton" or (backend == "auto" and q.is_cuda):
        from k3kernels.latent_attention.triton_split import latent_attention_triton  # imports triton

        return latent_attention_triton(q, latents, lengths, values, scale)
    return latent_attention_torch(q, latents, lengths, values, scale)


def latent_attention_torch(q: Tensor, latents: Tensor, lengths: Tensor, values: int, scale: float) -> Tensor:
    """`latent_attention` in plain torch over the whole cache; arguments already checked."""
    scores = torch.matmul(q, latents.transpose(1, 2)).float() * scale  # [B, H, S]
    beyond = torch.arange(latents.shape[1], device=q.device) >= lengths[:, None]
    p = torch.softmax(scores.masked_fill(beyond[:, None], float("-inf")), dim=-1).to(latents.dtype)
    return torch.matmul(p, latents[..., :values])
