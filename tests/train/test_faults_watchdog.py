"""A rank that is lost inside a step: every rank writes its stacks and leaves to be requeued; the run then goes on."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3train.train.callbacks import watchdog
from tests.train import warm

HANG = "tests.train.faults:hang"


@pytest.mark.ops
def test_a_hung_collective_ends_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    two = ["parallel.data=2", "checkpoint.every=2"]
    job = warm.start(tmp_path, "run", *two, "train.watchdog_seconds=15", world=2, inject=HANG, step=4, rank=1)
    assert job.wait(240) == [75, 75], job.output()
    lost, waiting = ((job.run / f"logs/hang-rank{rank}.txt").read_text() for rank in (1, 0))
    assert "sleep_like_a_lost_rank" in lost and "rank 1 has been in step 4 for" in lost
    assert "rank 0 has been in step 4 for" in waiting and "sleep_like_a_lost_rank" not in waiting
    assert "distributed" in waiting  # rank 0 stands in a collective
    assert any(r.get("event") == "hang" for r in job.records())
    again = warm.start(tmp_path, "run", *two, world=2)
    assert again.wait() == [0, 0], again.output()
    assert "after step 2" in again.output()
    assert [s for s, _ in again.losses()] == list(range(1, 11))
    kept = [p.read_text() for p in sorted((again.run / "logs").glob("hang-*"))]
    assert kept == [waiting, lost], "the stacks are there for whoever looks in the morning"


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda *_, **__: None)  # ends without asking
    monkeypatch.setattr(sys, "stderr", open(os.devnull, "w"))  # noqa: SIM115
    return codes


def _dog(folder: Path, seconds: float) -> tuple[watchdog.Watchdog, Any]:
    dog = watchdog.Watchdog(folder, 3, seconds)
    dog.grace = 0.1
    return dog, SimpleNamespace(state=SimpleNamespace(step=7))


def test_patience_is_long_before_the_first_step_is_over_and_short_after(tmp_path: Path, exits: list[int]) -> None:
    dog, trainer = _dog(tmp_path, 1.0)
    dog.on_start(trainer)
    dog.before_step(trainer)
    time.sleep(2.0)
    assert exits == []
    dog.on_step(trainer, None, {})  # type: ignore[arg-type]
    dog.before_step(trainer)
    until = time.monotonic() + 20
    while not exits and time.monotonic() < until:
        time.sleep(0.05)
    dog.close(trainer)
    assert exits[0] == 75
    said = (tmp_path / "hang-rank3.txt").read_text()
    assert "rank 3 has been in step 8 for" in said and "test_patience_is_long" in said


def test_a_dog_that_is_fed_stays_quiet_and_leaves_no_file(tmp_path: Path, exits: list[int]) -> None:
    dog, trainer = _dog(tmp_path, 5.0)
    dog.on_start(trainer)
    for _ in range(3):
        dog.before_step(trainer)
        dog.on_step(trainer, None, {})  # type: ignore[arg-type]
    dog.close(trainer)
    assert exits == [] and list(tmp_path.iterdir()) == []


def test_zero_seconds_is_no_dog(tmp_path: Path) -> None:
    dog, trainer = _dog(tmp_path, 0.0)
    dog.on_start(trainer)
    dog.before_step(trainer)
    dog.close(trainer)
    assert list(tmp_path.iterdir()) == []
