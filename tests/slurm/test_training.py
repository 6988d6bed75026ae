"""Real training on two Slurm nodes over gloo: stopped and requeued, it ends with an uninterrupted run's losses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .conftest import Desk

pytestmark = pytest.mark.ops

SMALL = [
    "experiment=smoke",
    "tracking=disabled",
    "train.steps=40",
    "train.eval_every=40",
    "train.sample_tokens=0",
    "train.threads=1",
]


def losses(desk: Desk, run: str) -> dict[int, float]:
    """Loss by step; a step logged twice must have been logged alike."""
    found: dict[int, float] = {}
    for line in (desk.folder / f"runs/{run}/metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "train/loss" in record:
            assert found.setdefault(record["step"], record["train/loss"]) == record["train/loss"]
    return found


def test_a_requeued_run_has_the_losses_of_an_uninterrupted_one(desk: Desk) -> None:
    whole = subprocess.run(
        [sys.executable, "-m", "k3train.cli", "train", *SMALL, "train.micro_batch=1", "parallel.data=2", "run.name=w"],
        cwd=desk.folder, env={**desk.environment(None), "K3TRAIN_LOGIN_NODE": "allow"}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert whole.returncode == 0, whole.stdout + whole.stderr

    job = desk.submit(*SMALL, "run.name=cut", do=None)
    metrics = desk.folder / "runs/cut/metrics.jsonl"
    desk.slurm.wait(lambda: metrics.is_file() and '"train/loss"' in metrics.read_text(), 300, "the first steps")
    desk.slurm.out("scancel", "-s", "USR1", job)
    desk.slurm.wait(lambda: desk.slurm.job(job).get("Restarts") == "1", 300, "the requeue")
    assert desk.slurm.ends(job, 600) == "COMPLETED", desk.log("cut")
    assert "resuming" in desk.log("cut")
    assert losses(desk, "cut") == losses(desk, "w")
    assert sorted(losses(desk, "cut")) == list(range(1, 41))
