"""kill -9 of one rank, of all, of the launcher, end to end: the others end soon, the first error is on top, and the
same command goes on at the last complete checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.train import warm

pytestmark = pytest.mark.ops

TWO = ["parallel.data=2", "train.steps=40", "checkpoint.every=4"]
LEFT = "removed what an interrupted save left"


def _start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    words = [*warm.SMALL, *TWO, *overrides, f"run.dir={folder}", "run.name=run"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK", "WORLD_SIZE", "MASTER_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "k3train.cli", "train", *words], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(warm.ROOT)},
    )  # fmt: skip


def _in_a_save(run: warm.Job, step: int, launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks, in the middle of a save after this step."""
    until = time.monotonic() + 240
    while not run.losses() or run.losses()[-1][0] <= step or not any((run.run / "checkpoints").glob(".writing-*")):
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    ranks = [p for p in psutil.Process(launcher.pid).children() if "k3train.launch" in p.cmdline()]
    return sorted(ranks, key=lambda p: int(p.environ()["RANK"]))


def _last(run: warm.Job) -> int:
    return run.losses()[-1][0]


def test_whoever_is_killed_in_a_save_the_others_end_and_the_run_goes_on(tmp_path: Path) -> None:
    run = warm.Job(tmp_path, "run", [], [])
    straight = warm.start(tmp_path, "straight", *TWO, world=2)

    launcher = _start(tmp_path)
    ranks = _in_a_save(run, 5, launcher)
    begun = time.monotonic()
    ranks[1].kill()
    _, errors = launcher.communicate(timeout=90)
    assert launcher.returncode == 137 and time.monotonic() - begun < 60
    assert "k3train: rank 1 was ended by SIGKILL" in errors and "Traceback" not in errors
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks)

    launcher = _start(tmp_path)
    ranks = _in_a_save(run, _last(run), launcher)
    for rank in ranks:
        rank.kill()
    said, errors = launcher.communicate(timeout=90)
    assert launcher.returncode == 137 and "was ended by SIGKILL" in errors and "resuming" in said
    cleared = LEFT in said

    launcher = _start(tmp_path)
    ranks = _in_a_save(run, _last(run), launcher)
    launcher.kill()
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive, "ranks outlived their launcher"
    said, _ = launcher.communicate()
    assert "Stopped (SIGTERM) with a checkpoint" in said
    assert cleared or LEFT in said, "no kill came in the middle of a save"

    launcher = _start(tmp_path)
    said, errors = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, errors
    assert "resuming" in said
    assert straight.wait() == [0, 0]
    assert run.losses() == straight.losses()


def test_a_stopped_rank_does_not_hold_the_others_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP, as a frozen node: the other rank's watchdog leaves for requeue and the launcher clears the rest away."""
    monkeypatch.setitem(os.environ, "K3TRAIN_STRAGGLE_SECONDS", "3")
    run = warm.Job(tmp_path, "run", [], [])
    launcher = _start(tmp_path, "train.watchdog_seconds=20")
    ranks = _in_a_save(run, 5, launcher)
    ranks[0].send_signal(signal.SIGSTOP)
    _, errors = launcher.communicate(timeout=180)
    assert launcher.returncode == 75, errors
    assert "rank 0 did not end with the others and is being ended" in errors
    assert "rank 1 has been in " in (run.run / "logs/hang-rank1.txt").read_text()
