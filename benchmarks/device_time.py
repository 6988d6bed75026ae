"""Times of the device alone, without what launching from Python costs.

A call is timed behind a pause that keeps the device busy until the host has queued everything; so the kernels of the call
follow each other without gaps, as in a training step whose host runs ahead. Between repeats a buffer larger than the
level-2 cache is cleared, outside the timed part.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from triton import knobs

PAUSE = 10_000_000  # clock cycles: about 5 ms on an H200, more than the host needs for a step's launches
FLUSH = 256 * 2**20


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def device_ms(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median milliseconds from the first kernel's start to the last one's end."""
    flush = torch.empty(FLUSH, dtype=torch.int8, device="cuda")
    call()
    pairs = []
    for _ in range(repeats):
        flush.zero_()
        torch.cuda._sleep(PAUSE)
        start = _event()
        call()
        pairs.append((start, _event()))
        torch.cuda.synchronize()
    return median([a.elapsed_time(b) for a, b in pairs])


def host_ms(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median milliseconds that the host needs to queue a call, while the device is kept busy."""
    call()
    seen = []
    for _ in range(repeats):
        torch.cuda._sleep(PAUSE)
        begin = perf_counter()
        call()
        seen.append((perf_counter() - begin) * 1e3)
        torch.cuda.synchronize()
    return median(seen)


@contextmanager
def _hooks(enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    knobs.runtime.launch_enter_hook.add(enter)
    knobs.runtime.launch_exit_hook.add(leave)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
        knobs.runtime.launch_exit_hook.remove(leave)


def kernel_ms(call: Callable[[], Any], repeats: int = 10) -> dict[str, float]:
    """Median milliseconds of every Triton kernel of a call, launches of one name added up; events around each launch."""
    call()
    runs: list[dict[str, float]] = []
    for _ in range(repeats):
        marks: list[list[Any]] = []

        def enter(metadata: Any, marks: list[list[Any]] = marks) -> None:
            marks.append([metadata.get()["name"], _event()])

        def leave(_: Any, marks: list[list[Any]] = marks) -> None:
            marks[-1].append(_event())

        torch.cuda._sleep(PAUSE)
        with _hooks(enter, leave):
            call()
        torch.cuda.synchronize()
        total: dict[str, float] = defaultdict(float)
        for name, begin, end in marks:
            total[name] += begin.elapsed_time(end)
        runs.append(total)
    return {name: median([run[name] for run in runs]) for name in runs[0]}
