"""Four steps of the tiny model in one process: in one go, and with a checkpoint and a fresh engine after the second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.parallel.tiny import SEED, batches, make_engine

Moment = tuple[float, float, dict[str, float]]  # loss, gradient norm, other metrics of a step


def steps(engine: Any, numbers: range) -> list[Moment]:
    micro = engine.micro_batches(engine.config.train.global_batch)
    results = [engine.step(batches(engine.config, engine.layout, n, SEED), 1e-3, micro) for n in numbers]
    return [(r.loss, r.grad_norm, r.extra) for r in results]


def straight_and_resumed(settings: dict[str, Any], folder: Path) -> tuple[list[Moment], list[Moment]]:
    """What four steps look like without a stop and with one; the same bits are wanted."""
    settings = {"train.global_batch": 2, **settings}
    straight = steps(make_engine({}, settings), range(4))
    first = make_engine({}, settings)
    before = steps(first, range(2))
    first.save(folder, {"step": 2})
    second = make_engine({}, settings)
    assert second.load(folder) == {"step": 2}
    return straight, before + steps(second, range(2, 4))
