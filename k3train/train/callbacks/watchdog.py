"""A step that does not end: the stacks of every rank go to the log folder, and the process leaves to be requeued."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from k3train import launch
from k3train.engine.base import StepResult
from k3train.tracking.tracker import Tracker
from k3train.train.loop import Callback, Trainer

FIRST_STEP_FACTOR = 5.0  # start-up compiles kernels, connects ranks and reads cold files


class Watchdog(Callback):
    """Each rank has its own: a thread that is fed at every step border.

    Unfed for `seconds` it writes the stacks of all threads to LOGS/hang-rankN.txt, waits until the other ranks' dogs
    (fed at the same borders) have done the same, and ends the process with launch.EXIT_REQUEUE. A second dog, made by
    faulthandler without Python, acts where the first cannot: when something holds the interpreter lock.
    Before the first step is over the patience is FIRST_STEP_FACTOR times as long. 0 seconds: no dog.
    """

    def __init__(self, logs: Path, rank: int, seconds: float, tracker: Tracker | None = None) -> None:
        self.file, self.rank, self.seconds, self.tracker = logs / f"hang-rank{rank}.txt", rank, seconds, tracker
        self.grace = min(30.0, max(1.0, 0.2 * seconds))
        self._factor = FIRST_STEP_FACTOR
        self._step, self._where, self._fed = 0, "", 0.0
        self._closed = threading.Event()
        self._out: IO[str] | None = None

    def on_start(self, trainer: Trainer) -> None:
        if self.seconds <= 0:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._out = self.file.open("a")  # open before it is needed: a hang may be the file system's
        self._feed(trainer, "start")
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def before_step(self, trainer: Trainer) -> None:
        self._feed(trainer, f"step {trainer.state.step + 1}")

    def on_step(self, trainer: Trainer, result: StepResult, metrics: dict[str, Any]) -> None:
        self._factor = 1.0
        self._feed(trainer, f"what follows step {trainer.state.step} (evaluation, checkpoint)")

    def on_end(self, trainer: Trainer) -> None:
        self._feed(trainer, "the end of the run")

    def close(self, trainer: Trainer) -> None:
        self._closed.set()
        if self._out is not None:
            faulthandler.cancel_dump_traceback_later()
            self._out.close()
            self._out = None
            with contextlib.suppress(OSError):
                if self.file.stat().st_size == 0:
                    self.file.unlink()

    def _feed(self, trainer: Trainer, where: str) -> None:
        self._step, self._where, self._fed = trainer.state.step, where, time.monotonic()
        if self._out is not None:
            patience = self._factor * self.seconds + 2 * self.grace
            faulthandler.dump_traceback_later(patience, file=self._out, exit=True)

    def _watch(self) -> None:
        pause = min(1.0, self.seconds / 10)
        while not self._closed.wait(pause):
            waited = time.monotonic() - self._fed
            if waited > self._factor * self.seconds:
                self._bark(waited)

    def _bark(self, waited: float) -> None:
        where = self._where
        message = f"rank {self.rank} has been in {where} for {waited:.0f} s; stacks of all threads in {self.file}"
        if self._out is not None:
            print(f"{message}:\n", file=self._out, flush=True)
            faulthandler.dump_traceback(self._out, all_threads=True)
            self._out.flush()
        print(f"k3train: {message}; leaving to be requeued", file=sys.stderr, flush=True)
        if self.tracker is not None:
            with contextlib.suppress(Exception):
                self.tracker.event("hang", message, self._step)
        time.sleep(self.grace)  # the ranks that wait for this one fail as soon as it is gone: let them write first
        if self._where == where and not self._closed.is_set():
            _leave()


def _leave() -> None:
    """End this process. Whichever rank it is, it tells the batch script: rank 0 may be the one that is lost."""
    note = os.environ.get("K3TRAIN_EXIT_FILE")
    if note:
        with contextlib.suppress(OSError):
            Path(note).write_text(f"{launch.EXIT_REQUEUE}\n")
    os._exit(launch.EXIT_REQUEUE)
