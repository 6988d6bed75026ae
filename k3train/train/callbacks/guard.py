"""Steps without usable gradients: skipped and counted; after too many in a row, back to the last good checkpoint."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import Any

import torch.distributed as dist

from k3train.engine.base import StepResult
from k3train.errors import DivergenceError
from k3train.tracking.tracker import Tracker
from k3train.train import checkpoint as disk
from k3train.train.callbacks.checkpointing import Checkpointing
from k3train.train.loop import Callback, Trainer
from k3train.train.state import RunState

WINDOW = 64  # good gradient norms whose median is the yardstick
ENOUGH = 8  # of them, before a norm can be called exploding
SAME_PLACE = 3  # times that a run may go back to one checkpoint before it gives up


class Guard(Callback):
    """Judges each step; stands last, so that every other callback has seen the step before the run goes back.

    A step is bad where its loss or gradient norm is not finite, or the norm exceeds `growth` times the median of the
    last good ones: the engine then applies no update. More than `max_bad_steps` in a row end in going back to the
    newest checkpoint from before them, and the samples of those steps are left out from then on. They are remembered
    in the run's state and, until the next checkpoint, beside the checkpoints.
    """

    def __init__(
        self, checkpointing: Checkpointing, tracker: Tracker | None, *, growth: float | None, max_bad_steps: int
    ) -> None:
        self.checkpointing, self.tracker = checkpointing, tracker
        self.growth, self.max_bad_steps = growth, max_bad_steps
        self.notes = checkpointing.root / "left_out.json"

    def on_start(self, trainer: Trainer) -> None:
        state = trainer.state
        noted: list[Any] = [None]
        if trainer.is_main and state.step > 0 and self.notes.is_file():
            noted[0] = _read(self.notes)
        dist.broadcast_object_list(noted, src=0)
        if noted[0] is not None:
            state.left_out = _spans([*_each(state.left_out), *_each(noted[0]["left_out"])])
            state.rollbacks = max(state.rollbacks, noted[0]["rollbacks"], key=len)
        trainer.data.leave_out(list(_each(state.left_out)))
        if state.left_out:
            trainer.say(f"samples left out of the data: {_shown(state.left_out)}")

    def before_step(self, trainer: Trainer) -> None:
        norms = trainer.state.grad_norms
        known = self.growth is not None and len(norms) >= ENOUGH
        trainer.max_grad_norm = self.growth * statistics.median(norms) if known and self.growth else inf

    def on_step(self, trainer: Trainer, result: StepResult, metrics: dict[str, Any]) -> None:
        state = trainer.state
        if not result.skipped:
            state.bad_steps = 0
            state.grad_norms = [*state.grad_norms, result.grad_norm][-WINDOW:]
            return
        if state.bad_steps == 0:
            state.bad_since = state.consumed_samples - trainer.step_samples
        state.bad_steps += 1
        trainer.say(
            f"step {state.step} is skipped: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}"
            f"{_limit(trainer.max_grad_norm)}; {state.bad_steps} in a row, {state.skipped_steps} in all"
        )
        if state.bad_steps >= self.max_bad_steps:
            self._go_back(trainer)

    def _go_back(self, trainer: Trainer) -> None:
        state = trainer.state
        self.checkpointing.settle(trainer)
        last, first = state.step, state.step - state.bad_steps + 1
        target = self._target(trainer, first)
        offending = _spans(trainer.data.samples(state.bad_since, state.consumed_samples - state.bad_since))
        loaded = RunState.from_dict(trainer.engine.load(target.path))
        loaded.run_id, loaded.restarts, loaded.skipped_steps = state.run_id, state.restarts, state.skipped_steps
        loaded.left_out = _spans([*_each(state.left_out), *_each(offending)])
        loaded.rollbacks = [*state.rollbacks, target.step]
        loaded.bad_steps = 0
        vars(state).update(vars(loaded))
        trainer.data.leave_out(list(_each(state.left_out)))
        self.checkpointing.saved_step = target.step
        message = (
            f"steps {first} to {last} had no usable gradient: back to step {target.step}, "
            f"leaving out samples {_shown(offending)}"
        )
        trainer.say(message)
        if trainer.is_main:
            disk.forget_after(self.checkpointing.root, target.step)
            _write(self.notes, {"left_out": state.left_out, "rollbacks": state.rollbacks})
            if self.tracker is not None:
                self.tracker.rewind(target.step, message)
        dist.barrier()

    def _target(self, trainer: Trainer, first_bad: int) -> disk.Found:
        """The newest good checkpoint from before the bad steps, equal on all ranks. Raises DivergenceError."""
        choice: list[Any] = [None]
        if trainer.is_main:
            choice[0] = disk.newest_good(self.checkpointing.root, trainer.say, before=first_bad)
        dist.broadcast_object_list(choice, src=0)
        found: disk.Found | None = choice[0]
        state = trainer.state
        advice = "try a smaller optim.lr, a longer schedule.warmup_fraction, or look at the data of those steps"
        if found is None:
            raise DivergenceError(
                f"{state.bad_steps} steps in a row up to step {state.step} had no usable gradient, and there is no "
                f"good checkpoint from before step {first_bad} in {self.checkpointing.root}; {advice}"
            )
        if state.rollbacks.count(found.step) >= SAME_PLACE:
            raise DivergenceError(
                f"the run went back to step {found.step} {SAME_PLACE} times and again has no usable gradient at step "
                f"{state.step}; {advice}"
            )
        return found


def _limit(limit: float) -> str:
    return "" if limit == inf else f" (limit {limit:.4g})"


def _each(spans: Iterable[list[int]]) -> Iterable[int]:
    for first, end in spans:
        yield from range(first, end)


def _spans(samples: Iterable[int]) -> list[list[int]]:
    """[3, 4, 5, 9] -> [[3, 6], [9, 10]]."""
    spans: list[list[int]] = []
    for sample in sorted(set(samples)):
        if spans and spans[-1][1] == sample:
            spans[-1][1] += 1
        else:
            spans.append([sample, sample + 1])
    return spans


def _shown(spans: list[list[int]]) -> str:
    return ", ".join(str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in spans)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        noted = json.loads(path.read_text())
        return noted if {"left_out", "rollbacks"} <= set(noted) else None
    except (OSError, ValueError):
        return None


def _write(path: Path, noted: dict[str, Any]) -> None:
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(noted))
    beside.replace(path)
