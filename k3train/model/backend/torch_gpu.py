"""The `torch` backend: the local one with torch's own GPU kernels for packed attention and grouped products.

Needs nothing beside torch. Its linears, norms and element-wise parts are unfused, and FP8 is not among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from k3train.model.backend.local import Backend

if TYPE_CHECKING:
    from k3train.model.context import PackedStream

MAX_HEAD_DIM = 256
"""The widest head of torch's flash attention."""


def flash_width(key_dim: int, value_dim: int) -> int:
    """The head dimension the kernel runs at: one for queries, keys and values, a multiple of 8."""
    return -(-max(key_dim, value_dim) // 8) * 8


def head_dims_reason(key_dim: int, value_dim: int) -> str | None:
    """Why no kernel of this backend takes these head dimensions, or None."""
    if flash_width(key_dim, value_dim) <= MAX_HEAD_DIM:
        return None
    return f"torch's flash attention takes head dimensions up to {MAX_HEAD_DIM}"


class TorchBackend(Backend):
    """Flash attention over packed documents where there is a kernel (CUDA, 16-bit); the local path elsewhere."""

    name = "torch"
    notice = (
        "model.backend=torch: torch's own kernels, the slower GPU backend (no fused linears or norms, values padded to "
        "the key dimension in attention); model.backend=te is the faster one where transformer-engine is installed"
    )

    def attention(
        self, q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, stream: PackedStream, scale: float
    ) -> torch.Tensor:
        if not fits_flash(q_THK, v_THV):
            return super().attention(q_THK, k_THK, v_THV, stream, scale)
        cu, longest = stream.cu_seqlens.to(torch.int32), stream.longest()
        return varlen_flash(q_THK, k_THK, v_THV, cu, cu, longest, longest, scale)

    def suffix_attention(
        self, q_NHK: torch.Tensor, k_MHK: torch.Tensor, v_MHV: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if not fits_flash(q_NHK, v_MHV):
            return super().suffix_attention(q_NHK, k_MHK, v_MHV, scale)
        n, m = q_NHK.shape[0], k_MHK.shape[0]
        ends = torch.arange(2, dtype=torch.int32, device=q_NHK.device)
        return varlen_flash(q_NHK, k_MHK, v_MHV, ends * n, ends * m, n, m, scale)

    def suffixes_attention(
        self, q_NHK: torch.Tensor, k_MHK: torch.Tensor, v_MHV: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
        lengths: Sequence[tuple[int, int]] | int, scale: float,
    ) -> torch.Tensor:  # fmt: skip
        if not fits_flash(q_NHK, v_MHV):
            return super().suffixes_attention(q_NHK, k_MHK, v_MHV, cu_q, cu_k, lengths, scale)
        longest = self.longest(lengths, q_NHK.shape[0], k_MHK.shape[0])
        return varlen_flash(q_NHK, k_MHK, v_MHV, cu_q, cu_k, *longest, scale)


def fits_flash(q: torch.Tensor, v: torch.Tensor) -> bool:
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[0] > 0
        and (head_dims_reason(q.shape[-1], v.shape[-1]) is None)
    )


def varlen_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """Causal attention inside documents, aligned at their ends: q [N, H, K], k [M, H, K], v [M, H, V] -> [N, H, V].

    cu_q, cu_k int32 [D+1] on the device; max_q, max_k only bound the lengths, so nothing is read back to the host.
    """
    from torch.nn.attention.varlen import varlen_attn

    width, value_dim = flash_width(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x.contiguous() for x in (q, k, v))
    out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=(-1, 0))
    assert isinstance(out, torch.Tensor)
    return out[..., :value_dim]
