"""Attention residuals in plain torch: a softmax over depth, and its derivative written out (AttnRes, section 3).

A source v scores rms(v) . (norm_weight * query); the mix is the softmax-weighted sum of the raw sources.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def precision(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: fp32, or fp64 for fp64 sources."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def mix_naive(
    sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, eps: float, output_weight: Tensor | None,
    output_eps: float,
) -> Tensor:  # fmt: skip
    """The formula, differentiable by autograd; sources n tensors [T, d], query, norm_weight, output_weight [d]."""
    dtype = precision(sources[0].dtype)
    V = torch.stack([v.to(dtype) for v in sources])
    key = norm_weight.to(dtype) * query.to(dtype)
    scores = (V @ key) * torch.rsqrt(V.square().mean(-1) + eps)
    out = (torch.softmax(scores, 0)[..., None] * V).sum(0).to(sources[0].dtype)
    if output_weight is None:
        return out
    x = out.to(dtype)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + output_eps)
    return output_weight * normed.to(out.dtype)


def forward_torch(
    sources: Sequence[Tensor], key: Tensor, eps: float, output_weight: Tensor | None, output_eps: float
) -> tuple[Tensor, Tensor]:
    """key [d] in the arithmetic's dtype -> the (normed) mix [T, d] and the log of the softmax's denominator [T]."""
    dtype = key.dtype
    scores = torch.stack([_score(v.to(dtype), key, eps)[0] for v in sources])
    lse = torch.logsumexp(scores, 0)
    mixed = torch.zeros_like(sources[0], dtype=dtype)
    for v, s in zip(sources, scores):
        mixed.addcmul_((s - lse).exp_()[:, None], v.to(dtype))
    out = mixed.to(sources[0].dtype)
    if output_weight is None:
        return out, lse
    x = out.to(dtype)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + output_eps)
    return output_weight * normed.to(out.dtype), lse


def _score(v: Tensor, key: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """v [T, d] -> score, v . key and 1 / rms, each [T]."""
    r = torch.rsqrt(v.square().mean(-1) + eps)
    dot = v @ key
    return dot * r, dot, r


def backward_torch(
    bank: Sequence[Tensor], partial: Tensor | None, key: Tensor, eps: float, output_weight: Tensor | None,
    output_eps: float, lse: Tensor, grad: Tensor, grad_partial: Tensor | None,
) -> dict[str, Any]:  # fmt: skip
    """One mix backward, but for the bank, whose gradient waits for the block's other mixes.

    grad [T, d] of the (normed) mix, grad_partial [T, d] or None: of the running sum, from what comes after.
    Returns g [T, d], the gradient of the mix before its norm; weight, along_key, along_source [n, T], by which
    d bank_j = weight_j g + along_key_j key - along_source_j bank_j; partial, key, output_weight: their gradients.
    """
    dtype = key.dtype
    sources = [*bank] if partial is None else [*bank, partial]
    width = key.shape[0]
    parts = [_score(v.to(dtype), key, eps) for v in sources]
    weights = [(score - lse).exp() for score, _, _ in parts]
    g = grad.to(dtype)
    mixed = torch.zeros_like(g)
    for a, v in zip(weights, sources):
        mixed.addcmul_(a[:, None], v.to(dtype))
    found: dict[str, Any] = {"partial": None, "output_weight": None}
    if output_weight is not None:
        x = mixed.to(grad.dtype).to(dtype)
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + output_eps)
        normed = x * r
        found["output_weight"] = (g * normed.to(grad.dtype).to(dtype)).sum(0)
        h = g * output_weight.to(dtype)
        g = r * (h - normed * (h * normed).mean(-1, keepdim=True))
    total = (g * mixed).sum(-1)
    grad_key = torch.zeros_like(key)
    along_key, along_source = [], []
    for a, v, (_, dot, r) in zip(weights, sources, parts):
        slope = a * ((g * v.to(dtype)).sum(-1) - total) * r
        along_key.append(slope)
        along_source.append(slope * dot * r * r / width)  # score = (v . key) r with dr/dv = -r^3 v / d
        grad_key += slope @ v.to(dtype)
    if partial is not None:
        own = torch.outer(along_key[-1], key) - along_source[-1][:, None] * partial.to(dtype)
        own.addcmul_(weights[-1][:, None], g)
        found["partial"] = (own if grad_partial is None else own + grad_partial.to(dtype)).to(partial.dtype)
    n = len(bank)
    found |= {
        "g": g.to(grad.dtype), "key": grad_key, "weight": torch.stack(weights[:n]),
        "along_key": torch.stack(along_key[:n]), "along_source": torch.stack(along_source[:n]),
    }  # fmt: skip
    return found


def collect_torch(
    bank: Sequence[Tensor], arrived: Sequence[Tensor | None], mixes: Sequence[dict[str, Any]], keys: Sequence[Tensor]
) -> list[Tensor]:
    """Gradients of the bank from the `mixes` of a block (results of `backward_torch`) and what has `arrived`."""
    grads = []
    for j, v in enumerate(bank):
        dtype = keys[0].dtype
        first = arrived[j]
        total = torch.zeros_like(v, dtype=dtype) if first is None else first.to(dtype)
        beta = torch.zeros_like(mixes[0]["along_source"][j])
        for found, key in zip(mixes, keys):
            total = torch.addcmul(total, found["weight"][j][:, None], found["g"].to(dtype))
            total = torch.addcmul(total, found["along_key"][j][:, None], key[None])
            beta = beta + found["along_source"][j]
        grads.append((total - beta[:, None] * v.to(dtype)).to(v.dtype))
    return grads
