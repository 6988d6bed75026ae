"""Held-out loss every so many steps and at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from k3train.engine.base import Batch, Engine, StepResult
from k3train.train.loop import Callback, Trainer


class Evaluation(Callback):
    """`batches()` gives this rank's micro-batches of the same held-out sequences each time.

    bits_per_byte = loss / ln 2 * tokens / bytes of the held-out text; left out where tokens_per_byte is 0 (no text).
    accuracy(engine, batches, count): measured on the same micro-batches where given.
    """

    def __init__(
        self, every: int, batches: Callable[[], tuple[Iterator[Batch], int]], tokens_per_byte: float,
        unigram_loss: float | None = None, accuracy: Callable[[Engine, Iterator[Batch], int], float] | None = None,
    ) -> None:  # fmt: skip
        self.accuracy = accuracy
        self.every, self.batches = every, batches
        self.tokens_per_byte, self.unigram_loss = tokens_per_byte, unigram_loss

    def measure(self, trainer: Trainer) -> dict[str, float]:
        source, micro_batches = self.batches()
        loss, _ = trainer.engine.evaluate(source, micro_batches)
        trainer.state.validation_loss = loss
        metrics = {"valid/loss": loss}
        if self.tokens_per_byte > 0:
            metrics["valid/bits_per_byte"] = loss / math.log(2) * self.tokens_per_byte
        if self.accuracy is not None:
            metrics["valid/recall_accuracy"] = self.accuracy(trainer.engine, *self.batches())
        if self.unigram_loss is not None:
            metrics["valid/unigram_loss"] = self.unigram_loss
        trainer.shared["validation"] = metrics
        return metrics

    def on_step(self, trainer: Trainer, result: StepResult, metrics: dict[str, Any]) -> None:
        if trainer.finished or (self.every > 0 and trainer.state.step % self.every == 0):
            metrics |= self.measure(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if trainer.finished and "validation" not in trainer.shared:  # a finished run started again: say where it stands
            self.measure(trainer)
