"""What ranks run when checkpoints change layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.parallel.assemble import RankSeen
from tests.parallel.cases import observed_steps
from tests.parallel.tiny import SEED, batches, make_engine


def continue_run(
    sizes: dict[str, Any], load: str | None, save: str | None, step: int, steps: int = 1, optimizer: bool = True,
    overrides: dict[str, Any] | None = None,
) -> list[RankSeen]:  # fmt: skip
    """Load (or start), take `steps` steps from `step` on, save. A loading engine starts from other weights."""
    engine = make_engine(sizes, overrides, seed=SEED if load is None else SEED + 1)
    if load is not None:
        state = engine.load(Path(load), optimizer=optimizer)
        assert state == {"step": step}
    seen = observed_steps(engine, range(step, step + steps), SEED)
    if save is not None:
        engine.save(Path(save), {"step": step + steps})
    return seen


def loss_after(sizes: dict[str, Any], load: str | None, save: str | None) -> float:
    """Evaluation loss of a model that was loaded, or trained for one step and saved."""
    engine = make_engine(sizes, seed=SEED if load is None else SEED + 1)
    micro = engine.micro_batches(engine.config.train.global_batch)
    if load is not None:
        engine.load(Path(load))
    else:
        engine.step(batches(engine.config, engine.layout, 0, SEED), 1e-3, micro)
    if save is not None:
        engine.save(Path(save), {"step": 1})
    return engine.evaluate(batches(engine.config, engine.layout, 1, SEED), micro)[0]
