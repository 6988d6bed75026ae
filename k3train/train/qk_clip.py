"""QK-Clip (MuonClip of Kimi K2, kept in K3's recipe): attention heads whose logits outgrew a threshold are scaled back.

A step's largest logit S_h of head h, over all its micro-batches and ranks, gives gamma_h = min(1, tau / S_h). When the
optimizer has moved the weights, the head's rows of the query and key projections are multiplied by sqrt(gamma_h), and
its rows of the query for the key slice that all heads share by gamma_h, since that slice's own weights stay: the same
inputs then have a largest logit of tau. Only Gated MLA: KDA's queries and keys have unit length (spec 8, row 13).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from k3train.model.gated_mla import GatedMLA
from k3train.parallel.layout import Layout


def attentions(models: list[nn.Module]) -> list[GatedMLA]:
    """The layers that are clipped, in the order of this rank's chunks."""
    return [m for model in models for m in model.modules() if isinstance(m, GatedMLA)]


class QKClip:
    """Stands behind the inner steps of a megatron optimizer: it scales what those have just updated, fp32 masters or
    their shards, before they are rounded and sent to the other ranks. A step that is refused is not clipped."""

    def __init__(self, tau: float, models: list[nn.Module], optimizer: Any, layout: Layout) -> None:
        self.tau, self.layout, self.layers = tau, layout, attentions(models)
        device = next(p for model in models for p in model.parameters()).device
        for layer in self.layers:  # asks them to take note
            layer.max_logit = torch.full((layer.heads,), -torch.inf, device=device)
        self.numbers = torch.tensor([-torch.inf, 0.0], device=device)  # largest logit of the model, clipped heads
        self.factors: dict[int, torch.Tensor] = {}  # id of a weight -> fp32 [rows]
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            inner = getattr(part, "optimizer", None)
            if isinstance(inner, torch.optim.Optimizer):

                def scale(*_: Any, part: Any = part) -> None:
                    self._scale(part)

                inner.register_step_post_hook(scale)

    def measure(self) -> None:
        """Agree on the largest logits of the step's micro-batches and forget them; what the coming step of the
        optimizer is followed by follows from them. Collective over all ranks; waits for nothing."""
        layout = self.layout
        self.numbers = torch.tensor([-torch.inf, 0.0], device=self.numbers.device)
        if self.layers:
            largest = torch.cat([a.max_logit for a in self.layers if a.max_logit is not None])
            if layout.dp_cp.size() > 1:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=layout.dp_cp)
            # NaN compares false: a step with one is refused by its gradient norm
            gamma = torch.where(largest > self.tau, self.tau / largest, 1.0)
            for layer, of_layer in zip(self.layers, gamma.chunk(len(self.layers))):
                assert layer.max_logit is not None
                layer.max_logit.fill_(-torch.inf)
                self.factors |= {id(weight): rows for weight, rows in row_factors(layer, of_layer)}
            self.numbers = torch.stack([largest.max(), (gamma < 1).sum()])
        group = layout.groups.mp
        if group.size() > 1:
            dist.all_reduce(self.numbers[:1], op=dist.ReduceOp.MAX, group=group)
            dist.all_reduce(self.numbers[1:], group=group)

    def metrics(self) -> dict[str, float]:
        """Largest logit before the step and number of clipped heads, over the whole model."""
        largest, clipped = self.numbers.tolist()
        if not math.isfinite(largest):  # no attention layer, or no number to tell
            return {}
        return {"train/qk_max_logit": largest, "train/qk_clipped_heads": int(clipped)}

    @torch.no_grad()
    def _scale(self, part: Any) -> None:
        """Multiply what one megatron optimizer steps of the clipped weights."""
        for model, stepped, start in stepped_parameters(part) if self.factors else ():
            rows = self.factors.get(id(model))
            if rows is None:
                continue
            if stepped.shape == model.shape:
                stepped.mul_(rows[:, None])
            else:  # a range of the flattened weight
                flat = torch.arange(start, start + stepped.numel(), device=rows.device)
                stepped.view(-1).mul_(rows[flat // model.shape[1]])


def row_factors(layer: GatedMLA, gamma: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(weight, fp32 factor of each of its rows) for gamma [H_local]."""
    mla = layer.ctx.model.mla
    query = layer.q_proj if mla.q_lora_rank is None else layer.q_b_proj
    half, one = gamma.sqrt(), torch.ones_like(gamma)

    def rows(*blocks: tuple[torch.Tensor, int]) -> torch.Tensor:
        return torch.cat([factor[:, None].expand(-1, size) for factor, size in blocks], dim=1).reshape(-1)

    yield query.weight, rows((half, mla.nope_dim), (gamma, mla.shared_dim))  # type: ignore[misc]
    yield layer.kv_b_proj.weight, rows((half, mla.nope_dim), (one, mla.v_dim))  # type: ignore[misc]


def stepped_parameters(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """(model weight, tensor that the inner optimizer steps for it, where that begins in the flattened weight)."""
    if hasattr(part, "shard_fp32_from_float16_groups"):  # the distributed optimizer steps ranges
        pairs = [(part.model_float16_groups, part.shard_fp32_from_float16_groups)]
        pairs.append((part.model_fp32_groups, part.shard_fp32_groups))
        for models, shards in pairs:
            for of_group, held in zip(models, shards):
                for model, shard in zip(of_group, held):
                    yield model, shard, part._get_model_param_range_map(model)["param"].start
    elif hasattr(part, "fp32_from_float16_groups"):  # whole fp32 masters of a bf16 model
        for models, masters in zip(part.float16_groups, part.fp32_from_float16_groups):
            yield from ((model, master, 0) for model, master in zip(models, masters))
        for models in part.fp32_from_fp32_groups:
            yield from ((model, model, 0) for model in models)
    else:
        for group in part.optimizer.param_groups:
            yield from ((p, p, 0) for p in group["params"])
