"""USR1 or TERM at any moment, on one rank or all, once or twice: one consistent checkpoint, a request to be requeued,
and a restart that trains exactly what an uninterrupted run would have."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.train import warm

pytestmark = pytest.mark.ops

SLOW = "tests.train.faults:slow"
TWO = ["parallel.data=2", "train.eval_every=2", "checkpoint.every=3"]
USR1, TERM = signal.SIGUSR1, signal.SIGTERM


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    job = warm.start(tmp_path_factory.mktemp("straight"), "run", *TWO, world=2)
    assert job.wait() == [0, 0], job.output()
    return job.losses()


@pytest.mark.parametrize(
    ("place", "number", "rank", "times"),
    [
        ("start", USR1, None, 1),
        ("start", TERM, 1, 1),
        ("step", USR1, 1, 1),
        ("step", TERM, None, 2),
        ("evaluation", USR1, 0, 1),
        ("evaluation", TERM, None, 1),
        ("data", TERM, 1, 1),
        ("save", USR1, 1, 2),
        ("save", TERM, None, 1),
    ],
    ids=lambda value: "all ranks" if value is None else str(getattr(value, "name", value)),
)
def test_a_stop_is_one_checkpoint_and_loses_no_step(
    place: str, number: int, rank: int | None, times: int, straight: list[tuple[int, float]], tmp_path: Path
) -> None:
    job = warm.start(tmp_path, "run", *TWO, world=2, inject=SLOW, place=place, seconds=1.0)
    job.wait_for(f"at {place}", ranks=2 if place == "start" else 1)
    if place == "save":
        assert job.checkpoints() == []
    for _ in range(times):
        job.send(number, rank)
        time.sleep(0.3)
    assert job.wait() == [75, 75], job.output()
    (newest, *older) = reversed(job.checkpoints() or [0])
    assert len(older) <= 1 and not list((job.run / "checkpoints").glob(".writing*"))
    assert f"Stopped ({signal.Signals(number).name})" in job.output() or "Stopped (another rank" in job.output()
    again = warm.start(tmp_path, "run", *TWO, world=2)
    assert again.wait() == [0, 0], again.output()
    assert newest == 0 or f"after step {newest}" in again.output()
    assert again.losses() == straight


def test_a_stop_during_a_background_save_waits_for_it(straight: list[tuple[int, float]], tmp_path: Path) -> None:
    behind = [*TWO, "checkpoint.async_save=true", "checkpoint.every=2"]
    job = warm.start(tmp_path, "run", *behind, world=2, inject="tests.train.faults:slow_writing", seconds=2.0)
    job.wait_for("writing step 2")
    job.send(TERM, 1)
    assert job.wait() == [75, 75], job.output()
    assert job.checkpoints()[0] == 2 and len(job.checkpoints()) == 2
    again = warm.start(tmp_path, "run", *behind, world=2)
    assert again.wait() == [0, 0], again.output()
    assert again.losses() == straight
