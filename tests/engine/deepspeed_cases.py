"""What the ranks of the pool run with the DeepSpeed engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from k3train.engine import deepspeed_state
from k3train.engine.deepspeed import DeepSpeedEngine
from k3train.parallel import layout as layouts
from tests.parallel.tiny import SEED, batches, make_engine, tiny_config

os.environ["TORCHDYNAMO_DISABLE"] = "1"


def zero_engine(
    stage: int, overrides: dict[str, Any] | None = None, weights: dict[str, torch.Tensor] | None = None
) -> DeepSpeedEngine:
    """The tiny model under ZeRO; nothing stays whole in stage 3. weights: whole tensors to start from."""
    config = tiny_config({"parallel.distributed_optimizer": False, **(overrides or {})})
    config.engine.name, config.engine.zero_stage, config.engine.persistent_numel = "deepspeed", stage, 0
    layout = layouts.initialize(layouts.Sizes(world=dist.get_world_size()), timeout_minutes=1)
    engine = DeepSpeedEngine(config, layout, torch.device("cpu"))
    if weights is not None:
        fill(engine, weights)
    return engine


@torch.no_grad()
def fill(engine: DeepSpeedEngine, weights: dict[str, torch.Tensor]) -> None:
    for piece in deepspeed_state.pieces(engine):
        piece.fp32().copy_(piece.slice_of(weights[piece.name]))
    deepspeed_state.refresh_model(engine)
    for name, buffer in engine.model.named_buffers():
        if name in weights:
            buffer.copy_(weights[name])


def start_weights(overrides: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """What the megatron engine of the tests starts from, buffers included."""
    engine = make_engine({}, overrides)
    model = engine.models[0]
    return {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def run(engine: Any, steps: range) -> list[tuple[float, float]]:
    """(loss, gradient norm) of steps."""
    seen = []
    for step in steps:
        source = batches(engine.config, engine.layout, step, SEED)
        result = engine.step(source, engine.config.optim.lr, engine.micro_batches(engine.config.train.global_batch))
        assert not result.skipped
        seen.append((result.loss, result.grad_norm))
    return seen
