"""The softmax part of the cross entropy of one chunk of logits in plain torch, on one slice of the vocabulary."""

import torch
from torch import Tensor


def linear_cross_entropy_naive(hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """With whole logits, differentiable by autograd; one rank holds the whole vocabulary."""
    logits = torch.nn.functional.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=ignore_index)


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def statistics_torch(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits [c, V_local] of the vocabulary from `first` on -> highest logit, sum of exp(logit - highest), logit of the
    label (0 where another rank holds it), each [c]."""
    x = logits.to(arithmetic(logits.dtype))
    top = x.amax(-1)
    total = (x - top[:, None]).exp_().sum(-1)
    local = labels - first
    mine = (local >= 0) & (local < x.shape[1])
    target = x.gather(1, local.where(mine, 0)[:, None])[:, 0]
    return top, total, target.where(mine, 0.0)


def gradient_torch(logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, first: int) -> None:
    """logits := (softmax - one hot of the label) * grad, in place; lse, grad [c]."""
    x = (logits.to(lse.dtype) - lse[:, None]).exp_()
    local = labels - first
    mine = ((local >= 0) & (local < x.shape[1])).to(x.dtype)
    x.scatter_add_(1, local.clamp(0, x.shape[1] - 1)[:, None], -mine[:, None])
    logits.copy_(x.mul_(grad[:, None]))
