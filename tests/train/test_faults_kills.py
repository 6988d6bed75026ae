"""kill -9 during saves: whatever the moment, the next start goes on at the last complete checkpoint."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from k3train.train import checkpoint as disk
from tests.train import warm

pytestmark = pytest.mark.ops

KILL = "tests.train.faults:kill_in_save"
MOMENTS = 20


def _resumed_at(job: warm.Job) -> int:
    said = job.output()
    return int(said.split("after step ")[1].split()[0].rstrip(":")) if "after step " in said else 0


@pytest.mark.parametrize("behind", [False, True], ids=["a save that steps wait for", "a save behind the steps"])
def test_twenty_kills_at_random_moments_of_saves_cost_no_step(behind: bool, tmp_path: Path) -> None:
    """Each start goes on where the last whole checkpoint is, trains a step, saves, and is killed in that save."""
    every = ["checkpoint.every=1", "checkpoint.keep_last=2", f"checkpoint.async_save={str(behind).lower()}"]
    moments = MOMENTS // 2
    steps = moments + 14
    straight = warm.start(tmp_path, "straight", *every, f"train.steps={steps}")
    assert straight.wait() == [0], straight.output()
    # the first save of a process is the one that is hit; how long it takes on a busy machine is learnt as we go
    longest = next(r["checkpoint/save_seconds"] for r in straight.records() if "checkpoint/save_seconds" in r)
    draw = random.Random(7 + behind)
    before = interrupted = 0
    for _ in range(moments):
        delay = longest * draw.uniform(0.0, 1.2)
        job = warm.start(tmp_path, "killed", *every, f"train.steps={steps}", inject=KILL, delay=delay)
        (code,) = job.wait()
        assert _resumed_at(job) == before, job.output()
        assert code == -9, job.output()
        root = job.run / "checkpoints"
        interrupted += any(root.glob(".writing-*"))
        whole = [found.step for found in disk.list_checkpoints(root)]
        newest = disk.newest_good(root, pytest.fail)
        after = newest.step if newest else 0
        assert after == max(whole, default=0) >= before
        longest *= 0.9 if after > before else 1.3
        before = after
    last = warm.start(tmp_path, "killed", *every, f"train.steps={steps}")
    assert last.wait() == [0], last.output()
    assert _resumed_at(last) == before
    assert last.losses() == straight.losses()
    assert interrupted >= 3, "hardly a kill came in the middle of a save"


def test_a_rank_killed_in_a_save_takes_the_other_down_and_nothing_is_lost(tmp_path: Path) -> None:
    two = ["parallel.data=2", "checkpoint.every=3"]
    job = warm.start(tmp_path, "run", *two, world=2, inject=KILL, delay=0.0, nth=2, rank=1)
    begun = time.monotonic()
    codes = job.wait(180)
    assert codes[1] == -9 and codes[0] not in (0, 75), job.output()
    assert job.checkpoints() == [3] and time.monotonic() - begun < 120
    again = warm.start(tmp_path, "run", *two, world=2)
    assert again.wait() == [0, 0], again.output()
    assert "removed what an interrupted save left" in again.output() and _resumed_at(again) == 3
    assert [s for s, _ in again.losses()] == list(range(1, 11))
