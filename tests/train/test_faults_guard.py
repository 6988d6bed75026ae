"""Bad steps: NaN losses and exploding gradients are skipped on all ranks alike; many in a row lead back past them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from k3train.train.callbacks import guard
from tests.train import warm

POISON = "tests.train.faults:poison"
EVERY = ["train.max_bad_steps=3", "checkpoint.every=2", "checkpoint.keep_last=5"]


def events(job: warm.Job, kind: str) -> list[str]:
    return [r["message"] for r in job.records() if r.get("event") == kind]


@pytest.mark.parametrize("kind", ["nan", "explode"])
def test_a_bad_batch_on_one_rank_is_skipped_by_both(kind: str, tmp_path: Path) -> None:
    """Sample 38 is read by rank 1 alone, in step 10 of 12."""
    steps = ["train.steps=12", "parallel.data=2", "checkpoint.every=1000"]
    bad = warm.start(tmp_path, "bad", *steps, world=2, inject=POISON, samples=[38], kind=kind)
    good = warm.start(tmp_path, "good", *steps, world=2)
    assert bad.wait() == [0, 0] and good.wait() == [0, 0], bad.output()
    assert "step 10 is skipped" in bad.output() and "1 in a row, 1 in all" in bad.output()
    before = {s: x for s, x in good.losses() if s <= 9}
    after = dict(bad.losses())
    assert {s: after[s] for s in before} == before
    records = {r["step"]: r for r in bad.steps()}
    assert records[10]["train/skipped_steps"] == 1 and records[12]["train/skipped_steps"] == 1
    assert 10 not in after if kind == "nan" else records[10]["train/grad_norm"] > 1000
    # nothing moved: the next loss is that of the weights of step 9, on new data, and training goes on
    assert math.isfinite(after[11]) and after[12] != dict(good.losses())[12]


def test_bad_steps_in_a_row_lead_back_to_the_checkpoint_and_past_their_samples(tmp_path: Path) -> None:
    """Steps 6, 7, 8 read samples 20-31. The run goes back to step 4 and is then as one that never saw them."""
    job = warm.start(tmp_path, "run", *EVERY, inject=POISON, samples=[20, 24, 31], kind="nan")
    clean = warm.start(tmp_path, "clean", *EVERY, inject="tests.train.faults:leave_out", samples=list(range(20, 32)))
    assert job.wait() == [0] and clean.wait() == [0], job.output()
    message = "steps 6 to 8 had no usable gradient: back to step 4, leaving out samples 20-31"
    assert message in job.output()
    assert any(message in m for m in events(job, "rollback"))
    assert [s for s, _ in job.losses()] == list(range(1, 11)), "steps are in order and no bad one is left"
    assert job.losses() == clean.losses()
    assert json.loads((job.run / "checkpoints/left_out.json").read_text()) == {"left_out": [[20, 32]], "rollbacks": [4]}


@pytest.mark.ops
def test_left_out_samples_are_remembered_across_a_restart(tmp_path: Path) -> None:
    job = warm.start(tmp_path, "run", *EVERY, "train.stop_after=9", inject=POISON, samples=[20, 24, 31], kind="nan")
    assert job.wait() == [75], job.output()
    (job.run / "checkpoints/left_out.json").unlink()  # the checkpoint alone must do
    again = warm.start(tmp_path, "run", *EVERY, inject=POISON, samples=[20, 24, 31], kind="nan")
    assert again.wait() == [0], again.output()
    assert "samples left out of the data: 20-31" in again.output() and "skipped:" not in again.output()
    clean = warm.start(tmp_path, "clean", *EVERY, inject="tests.train.faults:leave_out", samples=list(range(20, 32)))
    assert clean.wait() == [0]
    assert again.losses() == clean.losses()


@pytest.mark.ops
def test_no_checkpoint_to_go_back_to_is_a_clear_error(tmp_path: Path) -> None:
    job = warm.start(tmp_path, "run", *EVERY, inject=POISON, samples=[0, 4, 8], kind="nan")
    assert job.wait() == [2]
    assert "3 steps in a row up to step 3 had no usable gradient, and there is no good checkpoint" in job.output()
    assert "smaller optim.lr" in job.output()


@pytest.mark.ops
def test_a_run_that_keeps_failing_gives_up(tmp_path: Path) -> None:
    job = warm.start(tmp_path, "run", *EVERY, inject=POISON, samples=list(range(20, 400)), kind="nan")
    assert job.wait() == [2]
    assert "went back to step 4 3 times and again has no usable gradient" in job.output()


def test_spans_of_samples_round_trip() -> None:
    spans = guard._spans([5, 3, 4, 9, 9])
    assert spans == [[3, 6], [9, 10]] and list(guard._each(spans)) == [3, 4, 5, 9]
    assert guard._shown(spans) == "3-5, 9"
