"""Periodic and final checkpoints; the save itself is the engine's, wholeness and pruning are train.checkpoint's."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from k3train.engine.base import StepResult
from k3train.errors import CheckpointError
from k3train.tracking.tracker import Tracker
from k3train.train import checkpoint as disk
from k3train.train.loop import Callback, Trainer

FAILURES = 3  # periodic saves that may fail in a row before the run gives up


class Checkpointing(Callback):
    """Saves every `checkpoint.every` steps, at a stop and at the end; never twice for one step.

    With `checkpoint.async_save` a periodic save goes on behind the steps and is collected at a later step border. A
    periodic save that fails (a full disk, say) is reported and the run goes on; the last one of a run must succeed.
    """

    def __init__(self, root: Path, about: dict[str, Any], tracker: Tracker | None = None) -> None:
        self.root, self.about, self.tracker = root, about, tracker
        self.saved_step: int | None = None  # of the last save that is whole, or of the checkpoint resumed from
        self.failures = 0  # in a row
        self._running: tuple[int, float, float] | None = None  # step, start, seconds waited of the background save

    def on_start(self, trainer: Trainer) -> None:
        self.saved_step = trainer.state.step or None

        def prepare() -> None:
            self.root.mkdir(parents=True, exist_ok=True)
            for path in disk.clear_unfinished(self.root):
                trainer.say(f"removed what an interrupted save left: {path.name}")

        _on_main(trainer, prepare, f"{self.root} cannot be used for checkpoints")

    def on_step(self, trainer: Trainer, result: StepResult, metrics: dict[str, Any]) -> None:
        self._collect(trainer, wait=False)
        if result.skipped:  # a checkpoint to go back to lies before the bad steps, never among them
            return
        every = trainer.config.checkpoint.every
        if trainer.finished:
            self.save(trainer)
        elif every > 0 and trainer.state.step % every == 0:
            self.save(trainer, periodic=True)

    def on_end(self, trainer: Trainer) -> None:
        self.save(trainer)

    def save(self, trainer: Trainer, *, periodic: bool = False) -> None:
        """Write the checkpoint of this step, unless there is one. Raises CheckpointError where it must succeed."""
        self.settle(trainer)
        step = trainer.state.step
        if self.saved_step == step or step == 0:
            return
        begun = time.perf_counter()
        writing, final = disk.writing_folder(self.root, step), disk.step_folder(self.root, step)
        about = {"step": step, **self.about}
        wait = not (periodic and trainer.config.checkpoint.async_save)
        try:
            _on_main(trainer, lambda: writing.mkdir(parents=True), f"{writing} cannot be made")
            trainer.engine.save(
                writing, trainer.state.to_dict(), seal=lambda sums: disk.finish(writing, final, about, sums), wait=wait
            )
        except CheckpointError as error:
            self._failed(trainer, step, error, periodic)
            return
        waited = time.perf_counter() - begun
        if wait:
            self._done(trainer, step, begun, waited)
        else:
            self._running = step, begun, waited

    def settle(self, trainer: Trainer) -> None:
        """Wait for the background save, if there is one."""
        self._collect(trainer, wait=True)

    def _collect(self, trainer: Trainer, *, wait: bool) -> None:
        if self._running is None:
            return
        step, begun, waited = self._running
        try:
            if trainer.engine.poll_save(wait=wait) is None:
                return
        except CheckpointError as error:
            self._running = None
            self._failed(trainer, step, error, periodic=True)
            return
        self._running = None
        self._done(trainer, step, begun, waited)

    def _done(self, trainer: Trainer, step: int, begun: float, waited: float) -> None:
        self.saved_step, self.failures = step, 0
        trainer.shared["checkpoint"] = disk.step_folder(self.root, step)
        took = time.perf_counter() - begun
        trainer.shared["save"] = {"checkpoint/save_seconds": took, "checkpoint/waited_seconds": waited}
        if trainer.is_main:
            keep = trainer.config.checkpoint
            try:
                disk.prune(self.root, keep.keep_last, keep.keep_every)
            except OSError as error:
                trainer.say(f"an old checkpoint could not be removed: {error}")

    def _failed(self, trainer: Trainer, step: int, error: CheckpointError, periodic: bool) -> None:
        self.failures += 1
        last = f"step {self.saved_step}" if self.saved_step else "none yet"
        message = f"checkpoint of step {step} failed: {error}; the last whole one: {last}"
        if trainer.is_main:
            shutil.rmtree(disk.writing_folder(self.root, step), ignore_errors=True)
            if self.tracker is not None:
                self.tracker.event("checkpoint", message, step)
        dist.barrier()
        if not periodic or self.failures >= FAILURES:
            raise CheckpointError(f"{message}. Make room in {self.root}, then start the run again") from error
        trainer.say(f"{message}; the run goes on")


def _on_main(trainer: Trainer, work: Callable[[], Any], failure: str) -> None:
    """Run `work` on rank 0 while the others wait. Raises CheckpointError on every rank where it fails."""
    outcome: list[Any] = [None]
    if trainer.is_main:
        try:
            work()
        except OSError as error:
            outcome[0] = f"{failure}: {error.strerror or error}"
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise CheckpointError(outcome[0])
