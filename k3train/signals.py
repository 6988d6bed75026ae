"""Signals that ask a run to stop, noted from the first moment of a process.

A scheduler may send USR1 or TERM while Python is still importing; the default action would kill the process. `listen`
is called before anything slow, only notes what came, and the training loop asks `asked()` at each step boundary.
Signals may come twice; SIGCONT, which Slurm sends along, is left alone.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_received: list[int] = []


def listen() -> None:
    """Note TERM, USR1 and the first INT instead of dying of them; a second INT interrupts. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in STOPPING:
        signal.signal(number, _note)


def _note(number: int, _frame: FrameType | None) -> None:
    if number == signal.SIGINT and signal.SIGINT in _received:
        raise KeyboardInterrupt
    _received.append(number)


def listening() -> bool:
    """Whether `listen` was called in this process."""
    return signal.getsignal(signal.SIGUSR1) is _note


def ignore() -> None:
    """Ignore them from now on: the work is done, and Python restores the deadly defaults while it shuts down."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)


def asked() -> str | None:
    """The name of the first signal that asked this process to stop ("SIGUSR1"), or None."""
    return signal.Signals(_received[0]).name if _received else None


def forget() -> None:
    """Start afresh; for tests and for several runs in one process."""
    _received.clear()
