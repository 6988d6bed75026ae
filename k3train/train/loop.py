"""The training loop. It reads like the algorithm; every feature of a run is a callback."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from k3train.config.schema import Config
from k3train.engine.base import Batch, Engine, StepResult
from k3train.train.schedule import global_batch, learning_rate
from k3train.train.state import RunState

CONTINUE, STOP = 0, 1


class BatchSource(Protocol):
    """Micro-batches of the global batch that starts at a global sample index: a pure function of that index."""

    def batches(self, consumed_samples: int, micro_batches: int) -> Iterator[Batch]: ...

    def samples(self, consumed_samples: int, count: int) -> list[int]:
        """Dataset indices of `count` sequences from that index on, over all ranks."""

    def leave_out(self, samples: Collection[int]) -> None:
        """Never give these dataset indices (again)."""


class Callback:
    """A feature of the run. Methods do nothing unless overridden; they run in the order callbacks are listed."""

    def on_start(self, trainer: Trainer) -> None: ...

    def before_step(self, trainer: Trainer) -> None: ...

    def on_step(self, trainer: Trainer, result: StepResult, metrics: dict[str, Any]) -> None: ...

    def on_end(self, trainer: Trainer) -> None: ...

    def close(self, trainer: Trainer) -> None:
        """Always runs, also when the loop was left by an error."""


@dataclass
class Trainer:
    """One run: engine, data, state, callbacks. `say` prints on rank 0."""

    config: Config
    engine: Engine
    data: BatchSource
    state: RunState
    callbacks: Sequence[Callback]
    is_main: bool = True
    say: Callable[[str], None] = print
    stop_reason: str | None = None
    step_samples: int = 0  # sequences of the last step
    max_grad_norm: float = inf  # of the next step; a callback may lower it
    shared: dict[str, Any] = field(default_factory=dict)  # what callbacks tell each other

    def request_stop(self, reason: str) -> None:
        """Stop after the current step; any rank may ask, all ranks stop together."""
        self.stop_reason = self.stop_reason or reason

    @property
    def finished(self) -> bool:
        return self.state.step >= self.config.train.steps

    def train(self) -> RunState:
        """Steps until all are done or the ranks agree to stop; callbacks are closed however it ends."""
        try:
            for callback in self.callbacks:
                callback.on_start(self)
            while not self.finished and not self._stop_agreed():
                self._step()
            for callback in self.callbacks:
                callback.on_end(self)
        finally:
            for callback in self.callbacks:
                callback.close(self)
        return self.state

    def _stop_agreed(self) -> bool:
        if self.config.train.stop_after is not None and self.state.step >= self.config.train.stop_after:
            self.request_stop(f"train.stop_after={self.config.train.stop_after}")
        if self.engine.agree(STOP if self.stop_reason else CONTINUE) == STOP:
            self.request_stop("another rank asked to stop")
            return True
        return False

    def _step(self) -> None:
        config, state = self.config, self.state
        samples = global_batch(state.step, config.train.global_batch, config.schedule.batch_ramp)
        lr = learning_rate(state.step, config.train.steps, config.optim.lr, config.schedule)
        for callback in self.callbacks:
            callback.before_step(self)
        start = time.perf_counter()
        micro = self.engine.micro_batches(samples)
        batches = self.data.batches(state.consumed_samples, micro)
        result = self.engine.step(batches, lr, micro, max_grad_norm=self.max_grad_norm)
        seconds = time.perf_counter() - start
        state.step += 1
        self.step_samples = samples
        state.consumed_samples += samples
        state.consumed_tokens += samples * config.train.seq_length
        state.skipped_steps += result.skipped
        if not result.skipped:
            state.last_loss = result.loss
            state.first_loss = result.loss if state.first_loss is None else state.first_loss
        metrics: dict[str, Any] = {
            "train/loss": result.loss,
            "train/lr": lr,
            "train/grad_norm": result.grad_norm,
            "train/clipped": float(result.grad_norm > config.optim.clip_grad > 0),
            "train/step_seconds": seconds,
            "train/tokens_per_second": samples * config.train.seq_length / seconds,
            "train/consumed_tokens": state.consumed_tokens,
            "train/skipped_steps": state.skipped_steps,
            "data/consumed_samples": state.consumed_samples,
        }
        metrics |= result.extra
        for callback in self.callbacks:
            callback.on_step(self, result, metrics)
