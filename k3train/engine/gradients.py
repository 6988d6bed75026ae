"""What must be added up at the end of a step besides the data-parallel reduction: partial replicated gradients, and
the routing counts of quantile balancing."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from k3train.model import quantile_balancing
from k3train.model.latent_moe import Router
from k3train.parallel.layout import Layout


def sum_over_tensor_ranks(models: list[nn.Module], layout: Layout) -> None:
    """Sum the gradients of replicated parameters that each tensor rank saw in part (own tokens or own heads)."""
    if layout.sizes.tensor == 1:
        return
    grads = [p.main_grad for m in models for p in m.parameters() if getattr(p, "sum_over_tensor", False)]
    if not grads:
        return
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, group=layout.tp)
    for g, part in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(part.view_as(g))


def routers(models: list[nn.Module]) -> list[Router]:
    """Routers of this rank's chunks in layer order."""
    found = [m for model in models for m in model.modules() if isinstance(m, Router)]
    return sorted(found, key=lambda r: r.layer)


def balance(models: list[nn.Module], layout: Layout) -> dict[int, torch.Tensor]:
    """Once a step: pool the integer counts of all ranks that hold tokens, solve the new biases, reset the counts.

    One all-reduce of int64 counts for all layers of this stage. Returns the pooled load int64 [E] by layer.
    """
    active = [r for r in routers(models) if r.load is not None]
    if not active:
        return {}
    # with tensor but without sequence parallelism every tensor rank counts the same tokens: pool over the others only
    group = layout.dp_cp if layout.sizes.tensor > 1 and not layout.sizes.sequence_parallel else layout.token_group
    # every layer has the same shapes: one tensor, one all-reduce, one solution for all of them
    width = active[0].bias.numel()
    parts = [t.view(width, -1) for r in active for t in (r.load, r.counts) if t is not None]
    each = len(parts) // len(active)
    pooled = torch.cat(parts, dim=1).contiguous()  # a layer's load, then its counts, side by side for every expert
    if group.size() > 1:
        dist.all_reduce(pooled, group=group)
    layers = pooled.view(width, len(active), -1).transpose(0, 1)  # [layers, E, 1 + bins]
    load = layers[..., 0]
    bias = torch.stack([r.bias for r in active])
    moe, mode = active[0].ctx.model.moe, active[0].ctx.model.balancing
    if each > 1:
        bias = quantile_balancing.update(layers[..., 1:], bias, moe.top_k, ema=moe.balancing.ema)
    elif mode == "sign":
        bias = quantile_balancing.sign_update(load, bias, moe.balancing.sign_step)
    for router, new in zip(active, bias.unbind(0)):
        router.bias.copy_(new)
        router.forget()
    return {router.layer: part for router, part in zip(active, load.unbind(0))}
