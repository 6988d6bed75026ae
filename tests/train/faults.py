"""What goes wrong inside a rank, on purpose. Each function is called in the rank before its run starts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def poison(samples: list[int], kind: str) -> None:
    """Batches that hold one of these dataset samples give a NaN loss, or a gradient thousands of times too long."""
    from k3train.train.data import Source

    plain = Source.batches

    def batches(self: Any, consumed_samples: int, micro_batches: int) -> Iterator[Any]:
        for m, batch in enumerate(plain(self, consumed_samples, micro_batches)):
            if set(self.loader.indices(consumed_samples, m)) & set(samples):
                mask = batch["loss_mask"].clone()
                # the weights of two tokens cancel in the count, not in the gradient; 3e38 times a loss overflows
                huge = 3e38 if kind == "nan" else 1e6
                mask[0], mask[1] = mask[0] + huge, mask[1] - huge
                batch["loss_mask"] = mask
            yield batch

    Source.batches = batches  # type: ignore[method-assign]


def kill_in_save(delay: float, nth: int = 1, rank: int | None = None) -> None:
    """kill -9 `delay` seconds after the `nth` save begins."""
    from k3train.engine.megatron import MegatronEngine

    if rank is not None and os.environ.get("RANK", "0") != str(rank):
        return
    plain, seen = MegatronEngine.save, [0]

    def save(self: Any, *arguments: Any, **options: Any) -> None:
        seen[0] += 1
        if seen[0] == nth:
            threading.Thread(target=_kill_after, args=(delay,), daemon=True).start()
        plain(self, *arguments, **options)

    MegatronEngine.save = save  # type: ignore[method-assign]


def _kill_after(delay: float) -> None:
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)


def hang(step: int, rank: int) -> None:
    """One rank sleeps inside a step while the others wait for it in a collective."""
    from k3train.engine.megatron import MegatronEngine

    plain, seen = MegatronEngine.step, [0]

    def stepping(self: Any, *arguments: Any, **options: Any) -> Any:
        seen[0] += 1
        if seen[0] == step and os.environ["RANK"] == str(rank):
            sleep_like_a_lost_rank()
        return plain(self, *arguments, **options)

    MegatronEngine.step = stepping  # type: ignore[method-assign]


def sleep_like_a_lost_rank() -> None:
    time.sleep(600)


def slow(place: str, seconds: float, rank: int | None = None) -> None:
    """Say `at PLACE` and sleep each time a place is passed, so that a test can send something right there.

    place: step | evaluation | data | save | start.
    """
    from k3train.engine.megatron import MegatronEngine
    from k3train.train.data import Source

    if rank is not None and os.environ.get("RANK", "0") != str(rank):
        return
    if place == "start":
        print("at start", flush=True)
        time.sleep(seconds)
        return
    owner, name = {
        "step": (MegatronEngine, "step"), "evaluation": (MegatronEngine, "evaluate"),
        "save": (MegatronEngine, "save"), "data": (Source, "batches"),
    }[place]  # fmt: skip
    plain = getattr(owner, name)

    def slowly(*arguments: Any, **options: Any) -> Any:
        print(f"at {place}", flush=True)
        until = time.monotonic() + seconds
        while time.monotonic() < until:  # a signal ends a sleep early
            time.sleep(0.01)
        return plain(*arguments, **options)

    setattr(owner, name, slowly)


def small_files(limit: int, steps: list[int], rank: int | None = None) -> None:
    """Files may not grow beyond `limit` bytes while checkpoints of these steps are written: a full disk."""
    import resource

    if rank is not None and os.environ.get("RANK", "0") != str(rank):
        return
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def begin(step: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit if step in steps else before[0], before[1]))

    _around_writing(begin, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before))


def slow_writing(seconds: float) -> None:
    """A disk that takes its time; says which step is being written."""

    def begin(step: int) -> None:
        print(f"writing step {step}", flush=True)
        time.sleep(seconds)

    _around_writing(begin, lambda: None)


def _around_writing(begin: Callable[[int], None], end: Callable[[], None]) -> None:
    """Call `begin` with the step, and `end`, around the writing of every checkpoint, in whichever thread it happens."""
    from k3train.engine.saving import Saver

    plain = Saver._write

    def write(self: Any, prepared: dict[str, Any], folder: Path, seal: Any) -> None:
        begin(int(folder.name.rpartition("-")[2]))
        try:
            plain(self, prepared, folder, seal)
        finally:
            end()

    Saver._write = write  # type: ignore[method-assign]


def skewed_clock(seconds: float) -> None:
    """This node's clock is wrong by so much."""
    plain = time.time
    time.time = lambda: plain() + seconds


def leave_out(samples: list[int]) -> None:
    """The data of a run that never had these samples."""
    from k3data.loader import GlobalBatchLoader

    plain = GlobalBatchLoader.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **{**options, "skip": samples})

    GlobalBatchLoader.__init__ = init  # type: ignore[method-assign]
