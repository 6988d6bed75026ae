"""A rank by itself: groups whose other members hold what this one holds, and the benchmark that times a rank in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import alone

ROOT = Path(__file__).parents[2]


def test_others_hold_what_this_rank_holds() -> None:
    group, own = alone.Alone(1, 3), torch.arange(4.0)
    parts = [torch.empty(4) for _ in range(3)]
    group.allgather([parts], [own])
    assert all(part.equal(own) for part in parts)
    whole = torch.empty(12)
    group._allgather_base(whole, own)
    assert whole.equal(own.repeat(3))
    mine = torch.empty(2)
    group._reduce_scatter_base(mine, torch.arange(6.0))
    assert mine.tolist() == [2, 3], "its own rows, as it gave them"
    longer = torch.ones(6)
    group.alltoall_base(longer, own, [], [])
    assert longer.tolist() == [0, 1, 2, 3, 0, 0]


def test_a_buffer_that_gathers_itself_keeps_the_other_parts() -> None:
    buffer = torch.arange(6.0)
    alone.Alone(1, 3)._allgather_base(buffer, buffer[2:4])
    assert buffer.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("place", ["2/2", "1", "x/2", "-1/2"])
def test_a_place_that_is_none_is_refused(place: str) -> None:
    with pytest.raises(SystemExit, match=r"RANK below WORLD, as in --alone 1/2"):
        alone.install(place)


@pytest.mark.ops
def test_a_rank_of_context_parallelism_is_timed_by_itself() -> None:
    words = [
        "--alone", "1/2", "--no-split", "--steps", "1", "--arms", "base", "model=k3_tiny", "parallel.context=2",
        "train.precision=auto", "train.cuda_graphs=none", "train.seq_length=128", "train.micro_batch=1",
        "train.global_batch=2",
    ]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "step.py"), *words], capture_output=True, text=True, timeout=300,
        check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0 and "== base" in done.stdout, done.stdout[-1000:] + done.stderr[-2000:]
    assert "over 2 x" in done.stdout and "step" in done.stdout
