"""The routing ops in plain torch: the oracle of the kernels, and what runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def route(
    logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [T, E], bias fp32 [E] -> weights [T, k], experts int64 [T, k], the first refused score with its bias [T],
    and whose it was [T]. Experts are chosen by sigmoid score plus bias and weighted by score alone."""
    scores = torch.sigmoid(logits)
    with torch.no_grad():
        top = torch.topk(scores + bias, top_k + 1, dim=-1)
    experts = top.indices[:, :top_k].contiguous()
    return (
        weigh(scores, experts, renormalize, scale),
        experts,
        top.values[:, top_k].contiguous(),
        top.indices[:, top_k].contiguous(),
    )


def weigh(scores: Tensor, experts: Tensor, renormalize: bool, scale: float) -> Tensor:
    """Weights [T, k] of the selected experts from all scores [T, E]."""
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale


def required_bias(scores: Tensor, bias: Tensor, cut: Tensor, cut_expert: Tensor) -> Tensor:
    """r fp64 [T, E]."""
    r = cut.double()[:, None] - scores.double()
    return r.scatter_(1, cut_expert[:, None], bias.double()[cut_expert][:, None])


def histogram(logits: Tensor, bias: Tensor, cut: Tensor, cut_expert: Tensor, bins: int, valid: Tensor | None) -> Tensor:
    """Counts int64 [E, bins] of the bias that each valid token would need to select each expert (report appendix D)."""
    r = required_bias(torch.sigmoid(logits), bias, cut, cut_expert)
    b = bias.double()
    low, high = b.min() - 1.0, b.max() + 1.0
    index = torch.floor((r - low) * bins / (high - low)).long().clamp_(0, bins - 1)
    experts = r.shape[1]
    index += torch.arange(experts, device=r.device) * bins
    one = torch.ones_like(index) if valid is None else valid.long()[:, None].expand_as(index)
    flat = torch.zeros(experts * bins, dtype=torch.int64, device=r.device)
    return flat.scatter_add_(0, index.reshape(-1), one.reshape(-1)).view(experts, bins)


def expert_counts(experts: Tensor, count: int, valid: Tensor | None) -> Tensor:
    """int64 [count]: copies of valid tokens that experts int64 [T, k] send to each expert."""
    one = torch.ones_like(experts) if valid is None else valid.long()[:, None].expand_as(experts)
    counts = torch.zeros(count, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, experts.reshape(-1), one.reshape(-1))


def permutation(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = experts.reshape(-1)
    source = torch.argsort(flat, stable=True).to(torch.int32)
    rows = torch.arange(flat.numel(), dtype=torch.int32, device=flat.device)
    place = torch.empty_like(rows).scatter_(0, source.long(), rows)
    return source, place, expert_counts(experts, count, None)
