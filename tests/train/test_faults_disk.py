"""Disks that are full, read-only or lie: a clear line, and the run goes on from the last complete checkpoint."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train import warm

FULL = "tests.train.faults:small_files"
EVERY = ["checkpoint.every=2", "checkpoint.keep_last=9"]
UNPRIVILEGED = "needs the right to mount a file system"


@pytest.mark.ops
@pytest.mark.parametrize("behind", ["false", "true"], ids=["in place", "behind the steps"])
def test_a_save_that_does_not_fit_is_told_and_the_run_goes_on(behind: str, tmp_path: Path) -> None:
    job = warm.start(tmp_path, "run", *EVERY, f"checkpoint.async_save={behind}", inject=FULL, limit=100_000, steps=[4])
    assert job.wait() == [0], job.output()
    assert "checkpoint of step 4 failed" in job.output() and "File too large" in job.output()
    assert "the last whole one: step 2; the run goes on" in job.output()
    assert job.checkpoints() == [2, 6, 8, 10]
    assert any(r.get("event") == "checkpoint" for r in job.records())


@pytest.mark.ops
def test_a_disk_that_stays_full_ends_the_run_with_what_to_do(tmp_path: Path) -> None:
    job = warm.start(tmp_path, "run", *EVERY, inject=FULL, limit=100_000, steps=[4, 6, 8, 10])
    assert job.wait() == [2], job.output()
    assert "checkpoint of step 8 failed" in job.output() and "Make room in" in job.output()
    again = warm.start(tmp_path, "run", *EVERY)
    assert again.wait() == [0], again.output()
    assert "after step 2" in again.output()


@pytest.mark.ops
def test_two_ranks_agree_that_a_save_failed_on_one(tmp_path: Path) -> None:
    two = [*EVERY, "parallel.data=2"]
    job = warm.start(tmp_path, "run", *two, world=2, inject=FULL, limit=100_000, steps=[4], rank=0)
    assert job.wait() == [0, 0], job.output()
    assert "checkpoint of step 4 failed" in job.output() and job.checkpoints() == [2, 6, 8, 10]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own for the checkpoints of run `run`."""
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "k3", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(UNPRIVILEGED)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.mark.ops
def test_a_full_file_system(mounted: Path, tmp_path: Path) -> None:
    job = warm.start(tmp_path, "run", *EVERY, "train.steps=4")
    assert job.wait() == [0], job.output()
    free = shutil.disk_usage(mounted).free
    (mounted / "ballast").write_bytes(b"x" * (free - 200_000))
    more = warm.start(tmp_path, "run", *EVERY)
    assert more.wait() == [2], more.output()
    assert "No space left on device" in more.output() and "the last whole one: step 4" in more.output()
    (mounted / "ballast").unlink()
    again = warm.start(tmp_path, "run", *EVERY)
    assert again.wait() == [0], again.output()
    assert "after step 4" in again.output()


@pytest.mark.ops
def test_a_file_system_that_turns_read_only(mounted: Path, tmp_path: Path) -> None:
    job = warm.start(tmp_path, "run", *EVERY, "train.stop_after=4")
    assert job.wait() == [75], job.output()
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    more = warm.start(tmp_path, "run", *EVERY)
    assert more.wait() == [2], more.output()
    assert "Read-only file system" in more.output() and "Traceback" not in more.output()
    subprocess.run(["mount", "-o", "remount,rw", str(mounted)], check=True)
    again = warm.start(tmp_path, "run", *EVERY)
    assert again.wait() == [0], again.output()
    assert "after step 4" in again.output()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    job = warm.start(folder, "run", *EVERY, "checkpoint.every=4")
    assert job.wait() == [0], job.output()
    assert job.checkpoints() == [4, 8, 10]
    return folder


def _flip(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 16
    shard.write_bytes(data)


def _truncate(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 9)


DAMAGE = {
    "a flipped bit": (_flip, "does not have the checksum of the manifest"),
    "a truncated shard": (_truncate, "bytes, the manifest says"),
    "a missing shard": (Path.unlink, "is missing"),
    "a torn manifest": (lambda shard: _truncate(shard.parent / "manifest.json"), "unreadable manifest.json"),
}


@pytest.mark.ops
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_walks_back_past_damage_and_says_so(damage: str, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "run", tmp_path / "run")
    harm, words = DAMAGE[damage]
    (shard,) = (tmp_path / "run/checkpoints/step-00000010").glob("*.distcp")
    harm(shard)
    straight = warm.Job(finished, "run", [], []).losses()
    job = warm.start(tmp_path, "run", *EVERY, "checkpoint.every=4")
    assert job.wait() == [0], job.output()
    assert "checkpoint damaged, walking back" in job.output() and words in job.output()
    assert "after step 8" in job.output() and job.losses() == straight


@pytest.mark.ops
def test_clocks_that_disagree_do_not_choose_the_checkpoint(finished: Path, tmp_path: Path) -> None:
    """The newest step is found by its number: its files are a year old, the older ones are from tomorrow."""
    shutil.copytree(finished / "run", tmp_path / "run")
    now = (tmp_path / "run/metrics.jsonl").stat().st_mtime
    for step, moment in ((4, now + 86_400), (8, now + 90_000), (10, now - 31_536_000)):
        folder = tmp_path / f"run/checkpoints/step-{step:08d}"
        for path in [*folder.iterdir(), folder]:
            os.utime(path, (moment, moment))
    job = warm.start(
        tmp_path, "run", *EVERY, "train.steps=12", inject="tests.train.faults:skewed_clock", seconds=-86_400.0
    )
    assert job.wait() == [0], job.output()
    assert "after step 10" in job.output()
    assert [s for s, _ in job.losses()] == list(range(1, 13)) and job.checkpoints()[-1] == 12
