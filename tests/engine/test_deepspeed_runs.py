"""`k3train train engine=deepspeed` with real ranks: killed in the middle of a save, started again, the same losses."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from k3train.train import checkpoint as disk
from tests.train import warm

pytestmark = pytest.mark.ops
ZERO3 = (
    "engine=deepspeed", "engine.zero_stage=3", "engine.persistent_numel=0", "parallel.world=2", "train.micro_batch=1",
    "train.steps=4", "train.global_batch=2", "checkpoint.every=2", "model.moe.experts=8",
)  # fmt: skip


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


def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    straight = warm.start(tmp_path, "straight", *ZERO3, world=2)
    assert straight.wait(200) == [0, 0], straight.output()
    assert [step for step, _ in straight.losses()] == [1, 2, 3, 4] and straight.checkpoints() == [2, 4]

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
