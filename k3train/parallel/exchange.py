"""Differentiable exchanges between the ranks of a group. Every rank must call them in the same order, backward too:
autograd runs nodes from the last created to the first, so equal order in the forward is enough, as long as every
rank's result takes part in its loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def gather_first(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[n, ...] -> [ranks * n, ...] in rank order; not differentiable."""
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.shape = group, x.shape
        return gather_first(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # every rank adds its part: in fp32, since a sum over ranks in bf16 would lose what many ranks agree on
        total = grad.new_empty(ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        dist.reduce_scatter_tensor(total, grad.to(total.dtype).contiguous(), group=ctx.group)
        return total.to(grad.dtype), None


def gather_rows(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[n, ...] -> [ranks * n, ...] in rank order; the gradient is the sum over all ranks, cut back (in fp32)."""
    return _GatherRows.apply(x, group)


def _swap(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    give = x.shape[0] // 2
    kept = x.shape[0] - give
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out[:kept] = x[:kept]
    if give:
        sizes = [0] * group.size()
        sizes[group.size() - 1 - group.rank()] = give
        dist.all_to_all_single(out[kept:], x[kept:].contiguous(), sizes, sizes, group=group)
    return out


class _SwapHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _swap(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _swap(grad, ctx.group), None


def swap_halves(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[n, ...]: keep the first n - n // 2 rows, trade the others with the mirror rank. It undoes itself."""
    return _SwapHalves.apply(x, group)
