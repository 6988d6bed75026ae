"""Experts without a dispatcher: where one rank holds them all, tokens are sorted by expert and added up again.

The training path's all-to-all dispatcher reads counts on the host. Here every size follows from shapes, so that a
decode step can be captured; each token still meets its experts in ascending order, and is summed in that order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from k3train.model.latent_moe import LatentMoE


def routed_locally(moe: LatentMoE, z: torch.Tensor, weights: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    """`LatentMoE.routed` for experts that are all here. z [T, latent], weights fp32 and selection bool [T, E]."""
    tokens, experts = selected.shape
    k = moe.ctx.model.moe.top_k
    chosen = torch.topk(selected.to(torch.float32), k, dim=-1, sorted=False).indices.sort(-1).values  # [T, k]
    flat = chosen.reshape(-1)
    ordered, place = torch.sort(flat, stable=True)  # place: which (token, choice) stands at each row
    counts = (ordered[:, None] == torch.arange(experts, device=z.device)).sum(0)
    probs = weights.gather(1, chosen).reshape(-1)[place]
    out = moe.experts(z[place // k], counts, probs)
    back = torch.empty_like(place).scatter_(0, place, torch.arange(tokens * k, device=z.device))
    return out[back].view(tokens, k, -1).float().sum(1).to(z.dtype)


@contextmanager
def local_experts(model: nn.Module) -> Iterator[None]:
    """Within, the model's MoE layers use `routed_locally`, unless their experts are spread over ranks."""
    layers = [m for m in model.modules() if isinstance(m, LatentMoE) and m.ctx.layout.sizes.expert == 1]
    for moe in layers:
        moe.routed = partial(routed_locally, moe)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for moe in layers:
            del moe.routed
