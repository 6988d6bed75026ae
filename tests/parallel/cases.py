"""What the ranks run: train the tiny model under a layout and report everything that a layout must not change."""

from __future__ import annotations

from typing import Any

from k3train.engine import gradients
from k3train.engine.megatron import MegatronEngine
from tests.parallel.assemble import GradientPiece, RankSeen
from tests.parallel.observe import Selections, gradient_pieces
from tests.parallel.tiny import SEED, batches, make_engine


def observed_steps(engine: MegatronEngine, steps: range, seed: int) -> list[RankSeen]:
    """Run `steps` and look at each as this rank sees it."""
    record = Selections(engine)
    captured: list[list[GradientPiece]] = []
    real_step = engine.optimizer.step

    def step_and_look() -> Any:
        captured.append(gradient_pieces(engine))
        return real_step()

    engine.optimizer.step = step_and_look
    seen = []
    for step in steps:
        source = batches(engine.config, engine.layout, step, seed)
        result = engine.step(source, engine.config.optim.lr, engine.micro_batches(engine.config.train.global_batch))
        assert not result.skipped
        chosen, gap = record.take()
        selections = {n: [(start, experts.numpy()) for start, experts in parts] for n, parts in chosen.items()}
        biases = {r.layer: r.bias.clone().numpy() for r in gradients.routers(engine.models)}
        load = None if result.load is None else result.load.numpy()
        seen.append(
            RankSeen(result.loss, result.tokens, result.grad_norm, load, captured[-1], selections, gap, biases)
        )
    engine.optimizer.step = real_step
    engine.ctx.probe = None
    return seen


def train(
    sizes: dict[str, Any], overrides: dict[str, Any] | None = None, steps: int = 3, seed: int = SEED
) -> list[RankSeen]:
    """Build and train."""
    return observed_steps(make_engine(sizes, overrides, seed), range(steps), seed)
