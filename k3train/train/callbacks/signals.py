"""USR1, TERM and INT ask for a stop at the next step border; all ranks agree there and save one checkpoint."""

from __future__ import annotations

from typing import Any

from k3train import signals
from k3train.engine.base import StepResult
from k3train.train.loop import Callback, Trainer


class StopSignals(Callback):
    """Turns a signal noted since the process began into a stop request of this rank."""

    def on_start(self, trainer: Trainer) -> None:
        self._ask(trainer)

    def on_step(self, trainer: Trainer, result: StepResult, metrics: dict[str, Any]) -> None:
        self._ask(trainer)

    def _ask(self, trainer: Trainer) -> None:
        name = signals.asked()
        if name is not None:
            trainer.request_stop(name)
