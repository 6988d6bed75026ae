"""Periodic and final checkpoints; the save itself is the engine's, wholeness and pruning are train.checkpoint's."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from k3train.engine.base import StepResult
from k3train.train import checkpoint as disk
from k3train.train.loop import Callback, Trainer


class Checkpointing(Callback):
    """Saves every `checkpoint.every` steps, at a stop and at the end; never twice for one step."""

    def __init__(self, root: Path, about: dict[str, Any]) -> None:
        self.root, self.about = root, about
        self.saved_step: int | None = None
        self.save_seconds = 0.0

    def on_start(self, trainer: Trainer) -> None:
        self.saved_step = trainer.state.step or None
        if trainer.is_main:
            self.root.mkdir(parents=True, exist_ok=True)
            for path in disk.clear_unfinished(self.root):
                trainer.say(f"removed what an interrupted save left: {path.name}")
        dist.barrier()

    def on_step(self, trainer: Trainer, result: StepResult, metrics: dict[str, Any]) -> None:
        every = trainer.config.checkpoint.every
        if trainer.finished or (every > 0 and trainer.state.step % every == 0):
            self.save(trainer)

    def on_end(self, trainer: Trainer) -> None:
        self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        step = trainer.state.step
        if self.saved_step == step or step == 0:
            return
        start = time.perf_counter()
        writing, final = disk.writing_folder(self.root, step), disk.step_folder(self.root, step)
        if trainer.is_main:
            writing.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        trainer.engine.save(writing, trainer.state.to_dict())
        dist.barrier()
        if trainer.is_main:
            disk.finish(writing, final, {"step": step, **self.about})
            keep = trainer.config.checkpoint
            disk.prune(self.root, keep.keep_last, keep.keep_every)
        dist.barrier()
        self.saved_step = step
        self.save_seconds = time.perf_counter() - start
        trainer.shared["checkpoint"] = final
