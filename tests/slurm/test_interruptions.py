"""The real training on a real Slurm of two nodes: whatever stops it, its losses are those of a run nothing stopped."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from .conftest import Desk

pytestmark = pytest.mark.ops

SMALL = [
    "train=smoke", "train.steps=60", "train.seq_length=64", "train.eval_every=20", "train.eval_samples=2",
    "train.sample_tokens=0", "model.pattern=KF", "model.hidden_size=64", "tracking.wandb=offline",
    "checkpoint.every=10",
]  # fmt: skip


def records(desk: Desk, run: str) -> list[dict[str, Any]]:
    file = desk.folder / f"runs/{run}/metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def losses(desk: Desk, run: str) -> list[tuple[int, float]]:
    return [(r["step"], r["train/loss"]) for r in records(desk, run) if "train/loss" in r]


def reaches(desk: Desk, run: str, step: int) -> None:
    desk.slurm.wait(lambda: losses(desk, run)[-1:] >= [(step, 0.0)], 240, f"step {step} of {run}")


def restarted(desk: Desk, job: str, times: int) -> None:
    desk.slurm.wait(lambda: desk.slurm.job(job).get("Restarts") == str(times), 180, f"restart {times} of job {job}")


def ranks_of(run: str) -> list[int]:
    """Processes of the ranks: trainers whose command line names the run, started by a Slurm step."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            place = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = [v for v in place if v.startswith(b"SLURM_PROCID=")]
        in_step = any(v.startswith(b"SLURM_STEP_ID=") for v in place)
        if rank and in_step and b"python" in words[0] and f"run.name={run}".encode() in words:
            found.append((int(rank[0].split(b"=")[1]), int(process.name)))
    return [pid for _, pid in sorted(found)]


def test_training_survives_a_signal_a_preemption_and_a_killed_rank(desk: Desk) -> None:
    straight = desk.submit(*SMALL, "run.name=straight", do=None)
    job = desk.submit(*SMALL, "run.name=stopped", do=None)
    reaches(desk, "stopped", 5)
    desk.slurm.out("scancel", "-b", "-s", "USR1", job)  # as before the time limit
    restarted(desk, job, 1)
    reaches(desk, "stopped", 22)
    desk.slurm.out("scontrol", "requeue", job)  # TERM to all, as in a preemption
    restarted(desk, job, 2)
    reaches(desk, "stopped", 42)
    os.kill(ranks_of("stopped")[1], signal.SIGKILL)
    restarted(desk, job, 3)
    assert desk.slurm.ends(straight, 300) == "COMPLETED", desk.log("straight")
    assert desk.slurm.ends(job, 300) == "COMPLETED", desk.log("stopped")

    assert [s for s, _ in losses(desk, "straight")] == list(range(1, 61))
    assert losses(desk, "stopped") == losses(desk, "straight")
    log = desk.log("stopped")
    assert [f"start {n}" in log for n in range(4)] == [True] * 4
    # every rank is sent TERM, and the other one's may be the first to be heard
    preempted = "Stopped (SIGTERM)" in log or "Stopped (another rank asked to stop)" in log
    assert "Stopped (SIGUSR1)" in log and preempted and log.count("resuming ") == 3
    wandb = [p.name.rpartition("-")[2] for p in (desk.folder / "runs/stopped/wandb").glob("offline-run-*")]
    assert len(wandb) == 4 and len(set(wandb)) == 1, "one W&B id for the life of the run"
    assert sum(r.get("event") == "resume" for r in records(desk, "stopped")) == 3


def test_a_lost_rank_is_noticed_and_the_job_goes_on(desk: Desk) -> None:
    """One rank is stopped, as on a node that has frozen: the other one's watchdog ends the step, Slurm restarts it."""
    job = desk.submit(*SMALL, "train.steps=20", "run.name=lost", "train.watchdog_seconds=20", do=None)
    reaches(desk, "lost", 12)
    os.kill(ranks_of("lost")[0], signal.SIGSTOP)
    restarted(desk, job, 1)
    assert desk.slurm.ends(job, 240) == "COMPLETED", desk.log("lost")
    assert [s for s, _ in losses(desk, "lost")] == list(range(1, 21))
    assert "leaving to be requeued" in desk.log("lost") and "after step 10" in desk.log("lost")
