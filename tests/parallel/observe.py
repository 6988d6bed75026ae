"""What one rank sees of a training step: its gradients and parameters, the experts of its tokens, selection gaps.

Nothing is gathered here: pieces go to the test as they are, which puts them together (`assemble`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from k3train.engine.gradients import routers
from k3train.engine.megatron import MegatronEngine
from tests.parallel.assemble import Piece


def pieces_of(engine: MegatronEngine, take: Callable[[torch.nn.Parameter], torch.Tensor]) -> list[Piece]:
    """This rank's part of what `take` gives of every parameter: the parameter itself after a step, or its `main_grad`
    right before the optimizer steps.

    A rank contributes what its optimizer would use: where optimizer state is cut over ranks, its own range of each
    parameter; else, as under Muon, all of it.
    """
    owned: dict[torch.nn.Parameter, slice] = {}
    for optimizer in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        if isinstance(optimizer, DistributedOptimizer):
            for bucket in (b for per in optimizer.gbuf_ranges for bs in per.values() for b in bs):
                for param, ranges in bucket["param_map"].items():
                    owned[param] = slice(ranges["param"].start, ranges["param"].end)
    layout, pieces = engine.layout, []
    for model in engine.models:
        for name, param in model.named_parameters():
            if engine.shards_state and param not in owned:
                continue
            span, spec = owned.get(param, slice(0, param.numel())), param.k3
            place = layout.ep.rank() if spec.expert else layout.tp.rank()
            axis = 0 if spec.expert else spec.tensor_axis
            values = take(param).detach().reshape(-1)[span].clone().numpy()
            pieces.append(Piece(name, tuple(spec.shape), tuple(param.shape), axis, place, span.start, values))
    return pieces


class Selections:
    """Records the experts of every token, by layer and position in the global batch, and the smallest gap."""

    def __init__(self, engine: MegatronEngine) -> None:
        self.engine = engine
        engine.ctx.probe = self
        self.take()

    def take(self) -> tuple[dict[int, list[tuple[int, torch.Tensor]]], float]:
        """(layer -> [(first token, experts int64 [n, k])], smallest gap) since the last call."""
        taken = getattr(self, "pieces", {}), getattr(self, "gap", float("inf"))
        self.calls: dict[int, int] = {}
        self.pieces: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self.gap = float("inf")
        return taken

    def __call__(self, name: str, value: torch.Tensor) -> None:
        kind, _, rest = name.partition(".")
        if kind != "router" or not torch.is_grad_enabled():
            return
        layer, _, what = rest.partition(".")
        index = int(layer)
        if what == "scores":
            router = next(r for r in routers(self.engine.models) if r.layer == index)
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
