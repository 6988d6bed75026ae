"""What a restart leaves in the run's history, and what a checkpoint costs the steps."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.train import warm


def test_a_changed_configuration_is_told_and_kept_as_an_event(tmp_path: Path) -> None:
    first = warm.start(tmp_path, "run", "train.stop_after=3")
    assert first.wait() == [75], first.output()
    second = warm.start(tmp_path, "run", "optim.lr=0.002")
    assert second.wait() == [0], second.output()
    (event,) = [r for r in second.records() if r.get("event") == "config"]
    assert event["step"] == 3
    assert "optim.lr: 0.004 -> 0.002" in event["message"] and "train.stop_after: 3 -> None" in event["message"]
    assert "run.name" not in event["message"]
    assert "the configuration has changed since this run was last started: " + event["message"] in second.output()
    assert sum(r.get("event") == "resume" for r in second.records()) == 1


@pytest.mark.ops
def test_steps_wait_for_less_than_a_twentieth_of_a_save_behind_them(tmp_path: Path) -> None:
    size = ["model.pattern='KKKF*2 F'", "model.hidden_size=128", "train.steps=13", "checkpoint.every=2"]
    job = warm.start(tmp_path, "run", *size, "checkpoint.async_save=true")
    assert job.wait() == [0], job.output()
    saves = [r for r in job.records() if "checkpoint/save_seconds" in r][1:]  # the first one opens its group
    assert len(saves) >= 4
    shares = [r["checkpoint/waited_seconds"] / r["checkpoint/save_seconds"] for r in saves]
    assert statistics.median(shares) < 0.05, shares
