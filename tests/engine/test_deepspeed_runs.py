"""`k3train train engine=deepspeed` with real ranks: what the other engine's run records; killed in the middle of a save,
started again, the same losses."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from k3train.train import checkpoint as disk
from tests.train import warm

pytestmark = pytest.mark.ops
SAME = (
    "parallel.world=2", "train.micro_batch=1", "train.steps=4", "train.global_batch=2", "train.eval_every=2",
    "checkpoint.every=2", "model.moe.experts=8",
)  # fmt: skip
ZERO3 = (*SAME, "engine=deepspeed", "engine.zero_stage=3", "engine.persistent_numel=0")


@pytest.fixture(autouse=True)
def _deepspeed_is_installed() -> None:
    pytest.importorskip("deepspeed", reason="the extra deepspeed is not installed")


def die_while_writing(rank: int, save: int) -> None:
    """Rank `rank` is killed when it has written half of the files of its save number `save`."""
    from k3train.engine import deepspeed_saving

    write, count = deepspeed_saving.write_files, [0]

    def half(folder: Path, content: Any) -> Any:
        count[0] += 1
        if count[0] == save and os.environ.get("RANK") == str(rank):
            write(folder, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(folder, content)

    deepspeed_saving.write_files = half


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> warm.Job:
    """Four steps in stage 3 on two ranks, undisturbed."""
    job = warm.start(tmp_path_factory.mktemp("straight"), "straight", *ZERO3, world=2)
    assert job.wait(200) == [0, 0], job.output()
    assert [step for step, _ in job.losses()] == [1, 2, 3, 4] and job.checkpoints() == [2, 4]
    return job


def test_a_run_records_what_the_megatron_engines_run_does(straight: warm.Job, tmp_path: Path) -> None:
    """The same loop and callbacks: every metric of every step, and the losses of training and validation."""
    other = warm.start(tmp_path, "megatron", *SAME, world=2)
    assert other.wait(200) == [0, 0], other.output()
    mine, theirs = straight.records(), other.records()
    assert [sorted(r) for r in mine] == [sorted(r) for r in theirs]
    compared = 0
    for one, two in zip(mine, theirs):
        for key in ("train/loss", "train/grad_norm", "train/lr", "train/consumed_tokens", "valid/loss", "moe/max_vio"):
            if key in one:
                compared += 1
                assert one[key] == pytest.approx(two[key], rel=1e-4), (key, one["step"])
    assert compared >= 4 * 5 + 2 and any("kda/decay_mean" in r for r in mine)


def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(straight: warm.Job, tmp_path: Path) -> None:
    inject = "tests.engine.test_deepspeed_runs:die_while_writing"
    killed = warm.start(tmp_path, "killed", *ZERO3, world=2, inject=inject, rank=1, save=2)
    codes = killed.wait(200)
    assert codes[1] == -signal.SIGKILL and codes[0] != 0, killed.output()
    root = tmp_path / "killed" / "checkpoints"
    assert killed.checkpoints() == [2] and list(root.glob(".writing-*")), "a half is never taken for a whole"

    again = warm.start(tmp_path, "killed", *ZERO3, world=2)
    assert again.wait(200) == [0, 0], again.output()
    assert "resuming" in again.output() and "removed what an interrupted save left" in again.output()
    assert dict(again.losses()) == dict(straight.losses())
    assert again.checkpoints() == [2, 4] and not list(root.glob(".writing-*"))
    for found in disk.list_checkpoints(root):
        disk.verify(found.path)
