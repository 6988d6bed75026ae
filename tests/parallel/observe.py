"""What a test sees of a training step: whole gradients, expert selections by global token, selection gaps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from k3train.engine.megatron import MegatronEngine


def whole_gradients(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Every parameter's final gradient, whole, on rank 0 (empty elsewhere); call it right before the optimizer steps.

    A rank contributes what its optimizer would use: with the distributed optimizer, its own range of each parameter.
    """
    owned: dict[torch.nn.Parameter, slice] = {}
    for optimizer in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        if isinstance(optimizer, DistributedOptimizer):
            for bucket in (b for per in optimizer.gbuf_ranges for bs in per.values() for b in bs):
                for param, ranges in bucket["param_map"].items():
                    owned[param] = slice(ranges["param"].start, ranges["param"].end)
    distributed = engine.config.parallel.distributed_optimizer
    layout = engine.layout
    pieces = []
    for model in engine.models:
        for name, param in model.named_parameters():
            if distributed and param not in owned:
                continue
            span = owned.get(param, slice(0, param.numel()))
            spec = param.k3
            axis = 0 if spec.expert else spec.tensor_axis
            place = layout.ep.rank() if spec.expert else layout.tp.rank()
            pieces.append((name, spec.shape, tuple(param.shape), axis, place, span.start, param.main_grad.reshape(-1)[span]))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(pieces, everyone if dist.get_rank() == 0 else None)
    if dist.get_rank() > 0:
        return {}
    shards: dict[str, dict[int, torch.Tensor]] = {}
    shapes: dict[str, tuple[tuple[int, ...], int | None]] = {}
    for name, shape, local, axis, place, start, values in (p for ps in everyone for p in ps):
        flat = shards.setdefault(name, {}).setdefault(place, torch.full(local, float("nan")))
        region = flat.view(-1)[start : start + values.numel()]
        known = ~region.isnan()
        # replicas must agree: a rank whose copy of a gradient differs would train another model
        assert torch.allclose(region[known], values[known], rtol=1e-5, atol=1e-7), f"replicas of {name} differ"
        region.copy_(values)
        shapes[name] = (tuple(shape), axis)
    whole = {}
    for name, parts in shards.items():
        shape, axis = shapes[name]
        full = parts[min(parts)] if axis is None else torch.cat([parts[i] for i in sorted(parts)], dim=axis)
        for other in parts.values() if axis is None else ():
            assert torch.allclose(full, other, rtol=1e-5, atol=1e-7), f"tensor ranks disagree on {name}"
        assert tuple(full.shape) == shape and not full.isnan().any(), name
        whole[name] = full
    return whole


class Selections:
    """Records the experts of every token, by layer and position in the global batch, and the smallest gap."""

    def __init__(self, engine: MegatronEngine) -> None:
        self.engine = engine
        self.reset()
        engine.ctx.probe = self

    def reset(self) -> None:
        self.calls: dict[int, int] = {}
        self.pieces: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self.gap = float("inf")

    def __call__(self, name: str, value: torch.Tensor) -> None:
        kind, _, rest = name.partition(".")
        if kind != "router" or not torch.is_grad_enabled():
            return
        layer, _, what = rest.partition(".")
        index = int(layer)
        if what == "scores":
            router = next(m.layers[layer].moe.router for m in self.engine.models if layer in m.layers)
            top = torch.topk(value + router.bias, router.ctx.model.moe.top_k + 1, dim=-1).values
            self.gap = min(self.gap, float((top[:, -2] - top[:, -1]).min()))
        elif what == "experts":
            call = self.calls.get(index, 0)
            self.calls[index] = call + 1
            layout, train = self.engine.layout, self.engine.config.train
            total = train.micro_batch * train.seq_length
            start = (call * layout.sizes.data + layout.dp.rank()) * total
            start += layout.cp.rank() * (total // layout.sizes.context)
            if layout.sizes.sequence_parallel:
                start += layout.tp.rank() * value.shape[0]
            self.pieces.setdefault(index, []).append((start, value.clone()))

    def gather(self) -> tuple[dict[int, torch.Tensor], float]:
        """Experts int64 [global batch tokens, k] by layer, and the smallest gap over all ranks; on rank 0."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.gather_object((self.pieces, self.gap), everyone if dist.get_rank() == 0 else None)
        self.reset()
        if dist.get_rank() > 0:
            return {}, 0.0
        table: dict[int, dict[int, torch.Tensor]] = {}
        for pieces, _ in everyone:
            for layer, parts in pieces.items():
                for start, experts in parts:
                    table.setdefault(layer, {})[start] = experts
        return {n: torch.cat([p[s] for s in sorted(p)]) for n, p in sorted(table.items())}, min(g for _, g in everyone)
