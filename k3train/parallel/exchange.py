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


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """parts [ranks, ...]: part i goes to rank i; the answer's part i came from rank i."""
    out = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, parts.contiguous(), group=group)
    return out


def _tokens_to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _all_to_all(x.unflatten(1, (group.size(), -1)).transpose(0, 1), group).flatten(0, 1)


def _heads_to_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _all_to_all(x.unflatten(0, (group.size(), -1)), group).transpose(0, 1).flatten(1, 2)


class _TradeHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, to_heads: bool) -> torch.Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return (_tokens_to_heads if to_heads else _heads_to_tokens)(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (_heads_to_tokens if ctx.to_heads else _tokens_to_heads)(grad, ctx.group), None, None


def tokens_to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[n, H, C], this rank's tokens of all heads -> [ranks * n, H / ranks, C], all tokens of this rank's heads."""
    return _TradeHeads.apply(x, group, True)


def heads_to_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[ranks * n, H / ranks, C] -> [n, H, C]: undoes `tokens_to_heads`."""
    return _TradeHeads.apply(x, group, False)
