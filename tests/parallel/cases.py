"""What the ranks run: train the tiny model under a layout and report everything that a layout must not change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from k3train.engine import gradients
from k3train.engine.megatron import MegatronEngine
from tests.parallel.observe import Selections, whole_gradients
from tests.parallel.tiny import SEED, batches, make_engine


@dataclass
class Seen:
    """One optimizer step."""

    loss: float
    tokens: int
    grad_norm: float
    load: torch.Tensor
    gradients: dict[str, torch.Tensor]
    selections: dict[int, torch.Tensor]
    gap: float
    biases: dict[int, torch.Tensor]


def observed_steps(engine: MegatronEngine, steps: range, seed: int) -> list[Seen]:
    """Run `steps` and look at each; gradients, selections and biases are whole on rank 0."""
    record = Selections(engine)
    captured: list[dict[str, torch.Tensor]] = []
    real_step = engine.optimizer.step

    def step_and_look() -> Any:
        captured.append(whole_gradients(engine))
        return real_step()

    engine.optimizer.step = step_and_look
    seen = []
    for step in steps:
        source = batches(engine.config, engine.layout, step, seed)
        result = engine.step(source, engine.config.optim.lr, engine.micro_batches(engine.config.train.global_batch))
        assert not result.skipped
        selections, gap = record.gather()
        biases = {r.layer: r.bias.clone() for r in gradients.routers(engine.models)}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, biases)
        pooled: dict[int, torch.Tensor] = {}
        for one in everyone:
            for layer, bias in one.items():
                assert torch.equal(pooled.setdefault(layer, bias), bias), f"ranks disagree on the bias of layer {layer}"
        assert result.load is not None
        seen.append(Seen(result.loss, result.tokens, result.grad_norm, result.load, captured[-1], selections, gap, pooled))
    engine.optimizer.step = real_step
    engine.ctx.probe = None
    return seen


def train(
    sizes: dict[str, Any], overrides: dict[str, Any] | None = None, steps: int = 3, seed: int = SEED
) -> list[Seen] | None:
    """Build and train; rank 0 returns what it saw."""
    engine = make_engine(sizes, overrides, seed)
    seen = observed_steps(engine, range(steps), seed)
    return seen if dist.get_rank() == 0 else None
