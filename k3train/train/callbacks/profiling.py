"""`train.profile=START:STOP`: a chrome trace of these steps, the split of their time by part, and a memory snapshot."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from k3train.engine.base import StepResult
from k3train.train import profiling
from k3train.train.loop import Callback, Trainer

SNAPSHOT_ENTRIES = 200_000  # allocations that the memory snapshot remembers


class Profiling(Callback):
    """Traces steps START ... STOP - 1 (the first step is 1) of this rank into `folder`.

    trace.json opens in chrome://tracing or Perfetto, with the parts of the model as ranges; split.txt is the time by
    part; memory.pickle, with a GPU, opens at pytorch.org/memory_viz. Under train.cuda_graphs=step the ranges of
    captured micro-batches are missing, because Python does not run them.
    """

    def __init__(self, steps: str, folder: Path) -> None:
        first, _, stop = steps.partition(":")
        self.first, self.stop, self.folder = int(first), int(stop), folder
        self.inside: ExitStack | None = None

    def before_step(self, trainer: Trainer) -> None:
        number = trainer.state.step + 1
        if self.inside is not None or not self.first <= number < self.stop:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.inside = ExitStack()
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
        if hasattr(trainer.engine, "models"):
            self.inside.enter_context(profiling.annotated(trainer.engine))
        self.inside.enter_context(profiling.traced(self.folder / "trace.json"))

    def on_step(self, trainer: Trainer, result: StepResult, metrics: dict[str, Any]) -> None:
        if self.inside is not None and trainer.state.step + 1 >= self.stop:
            self._write(trainer)

    def close(self, trainer: Trainer) -> None:
        if self.inside is not None:
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        assert self.inside is not None
        self.inside.close()
        self.inside = None
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        split = profiling.read_trace(self.folder / "trace.json")
        text = "\n\n".join(part for part in (split.table(), split.waited_for(), split.top()) if part) + "\n"
        (self.folder / "split.txt").write_text(text)
        trainer.say(f"steps {self.first} to {self.stop - 1} are traced in {self.folder}\n{split.table()}")
