"""USR1, TERM and INT ask for a stop at the next step border; all ranks agree there and save one checkpoint."""

from __future__ import annotations

import signal
from types import FrameType

from k3train.train.loop import Callback, Trainer

CAUGHT = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class StopSignals(Callback):
    """Idempotent: a signal may come twice, on one rank or on all, at any moment after the handlers are set."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._trainer: Trainer | None = None
        self._before: dict[int, object] = {}
        for number in CAUGHT:
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C does not wait
        self.received = number
        if self._trainer is not None:
            self._trainer.request_stop(signal.Signals(number).name)

    def on_start(self, trainer: Trainer) -> None:
        self._trainer = trainer
        if self.received is not None:
            trainer.request_stop(signal.Signals(self.received).name)

    def close(self, trainer: Trainer) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]
