"""Rows that a kernel does not write: what stands there is whatever the memory held before, and a gradient of it too."""

from typing import Any

import torch
from torch import Tensor


class _LiveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        ctx.save_for_backward(first)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (first,) = ctx.saved_tensors
        rows = torch.arange(grad.shape[ctx.dim], device=grad.device)
        # masked_fill, not a product: 0 * NaN is NaN
        dead = (rows < first).view(-1, *[1] * (grad.dim() - 1 - ctx.dim))
        return grad.masked_fill(dead, 0), None, None


def live_rows(x: Tensor, first: Tensor, dim: int = 0) -> Tensor:
    """x itself, whose gradient is zero in the rows of `dim` before `first`, whatever arrives there.

    first: integer [1] on x's device; it is never read on the host.
    """
    return _LiveRows.apply(x, first, dim)
