"""A rank by itself: groups whose other members hold what this one holds, and the benchmark that times a rank in them. And
what the benchmarks of layouts refuse before they start a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import alone
import layouts

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


def step(*words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "step.py"), *words], capture_output=True, text=True, timeout=300,
        check=False, env=env,
    )  # fmt: skip


@pytest.mark.ops
def test_a_pipeline_is_refused_with_what_to_type() -> None:
    done = step("--alone", "1/2", "--arms", "data2,pipeline2_even")
    assert done.returncode == 2 and "pipeline2_even has parallel.pipeline=2" in done.stderr
    assert "torchrun --nproc-per-node=2 benchmarks/step.py --arms pipeline2_even" in done.stderr


def test_a_layout_that_is_none_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layouts, "measure", lambda *_: pytest.fail("nothing starts"))
    monkeypatch.setattr(sys, "argv", ["layouts.py", "--only", "CP2,CP3"])
    with pytest.raises(SystemExit):
        layouts.main()
    said = capsys.readouterr().err
    assert "--only: CP3: not one of TP2+SP" in said and "CP2 captured" in said


@pytest.mark.parametrize(("off", "code"), [(1e-3, None), (1e-1, "CP2: losses 1.00e-01, limit 3.00e-02")], ids=str)
def test_only_the_layouts_asked_for_run_and_one_beyond_the_noise_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, off: float, code: str | None
) -> None:
    one = {"losses": [2.0], "grad_norms": [1.0], "milliseconds": 1.0, "peak_gb": 0.0}
    asked: list[list[str]] = []

    def measure(_hidden: int, _sequence: int, on_two: dict[str, object]) -> dict[str, object]:
        asked.append(list(on_two))
        seen = {**one, "losses": [2.0 + off], "sent_mb_per_step": 0.0, "waits": []}
        return {
            "one": one, "spread": {"losses": 0.0, "grad_norms": 0.0}, "limits": {"losses": 3e-2, "grad_norms": 0.1},
            "layouts": dict.fromkeys(on_two, seen), "hidden": 1, "sequence": 1, "failed": "",
        }  # fmt: skip

    monkeypatch.setattr(layouts, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["layouts.py", "--only", "CP2"])
    if code is None:
        layouts.main()
    else:
        with pytest.raises(SystemExit, match=code):
            layouts.main()
    assert asked == [["CP2"]]


@pytest.mark.ops
def test_a_rank_of_context_parallelism_is_timed_by_itself() -> None:
    words = [
        "--alone", "1/2", "--no-split", "--steps", "1", "--arms", "base", "model=k3_tiny", "parallel.context=2",
        "train.precision=auto", "train.cuda_graphs=none", "train.seq_length=128", "train.micro_batch=1",
        "train.global_batch=2",
    ]  # fmt: skip
    done = step(*words)
    assert done.returncode == 0 and "== base" in done.stdout, done.stdout[-1000:] + done.stderr[-2000:]
    assert "over 2 x 989.5e12" in done.stdout, "tokens/s are those of two GPUs that all take as long"
