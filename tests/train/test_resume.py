"""Ten steps straight equal five, a stop, and five more: losses, optimizer state, data order, bit for bit on CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from k3train.errors import CheckpointError
from k3train.train import checkpoint as disk
from tests.train import warm

WHOLE_MODEL = ["model.pattern='KKKF*2 F'", "model.hidden_size=128", "train.seq_length=128"]


def train(folder: Path, name: str, *overrides: str) -> str:
    job = warm.start(folder, name, *WHOLE_MODEL, *overrides)
    assert job.wait(300)[0] in (0, 75), job.output()
    return job.output()


def losses(folder: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(m["step"], m["train/loss"], m["train/grad_norm"]) for m in lines if "train/loss" in m]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("runs")
    train(folder, "straight")
    first = train(folder, "halves", "train.stop_after=5")
    second = train(folder, "halves")
    return folder, first, second


def test_every_logged_loss_and_gradient_norm_is_bit_identical(runs: tuple[Path, str, str]) -> None:
    folder, _, _ = runs
    straight, halves = losses(folder / "straight"), losses(folder / "halves")
    assert [s for s, _, _ in straight] == list(range(1, 11))
    assert straight == halves


def test_weights_and_optimizer_state_are_bit_identical(runs: tuple[Path, str, str]) -> None:
    folder, _, _ = runs
    left, right = (disk.list_checkpoints(folder / name / "checkpoints")[-1].path for name in ("straight", "halves"))
    names = set(FileSystemReader(left).read_metadata().state_dict_metadata)
    assert names == set(FileSystemReader(right).read_metadata().state_dict_metadata)
    assert any("exp_avg" in name for name in names)
    a, b = (_load_state_dict_from_keys(checkpoint_id=str(path)) for path in (left, right))
    compared = 0
    for name in names:
        x, y = a.get(name), b.get(name)
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, y), name
            compared += 1
    assert compared > 100


def test_the_resumed_run_says_so_and_stops_are_announced(runs: tuple[Path, str, str]) -> None:
    _, first, second = runs
    assert "Stopped (train.stop_after=5) with a checkpoint" in first
    assert "resuming" in second and "after step 5" in second


def test_a_run_that_began_from_another_goes_on_from_its_own_checkpoint_and_says_so(
    runs: tuple[Path, str, str],
) -> None:
    folder, _, _ = runs
    command = ("begun", f"checkpoint.load={folder}/straight", "checkpoint.load_optimizer=false")
    first = train(folder, *command, "train.stop_after=2")
    weights = f"starting from the weights of {folder}/straight/checkpoints/step-00000010"
    assert f"{weights} (checkpoint.load, without the optimizer's state): this run has no whole checkpoint" in first
    assert "is not used" not in first and [s for s, _, _ in losses(folder / "begun")] == [1, 2]
    again = train(folder, *command, "train.stop_after=3")
    assert f"resuming {folder}/begun/checkpoints/step-00000002 after step 2" in again
    assert f"checkpoint.load={folder}/straight is not used: the run goes on from its own newest checkpoint" in again
    assert "starting from the weights" not in again and [s for s, _, _ in losses(folder / "begun")] == [1, 2, 3]


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU may take it")


def test_a_second_process_in_the_same_run_folder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    first = warm.start(tmp_path, "run", inject="tests.train.faults:slow", place="data", seconds=0.5)
    first.wait_for("at data")
    (tmp_path / "second").mkdir()
    second = warm.start(tmp_path / "second", "run", f"run.dir={tmp_path}")
    assert second.wait() == [2], second.output()
    assert f"process {first.processes[0].pid} is training in {first.run}" in second.output()
    assert "type run.name=OTHER" in second.output() and "Traceback" not in second.output()
    assert first.wait() == [0], first.output()
    assert [step for step, _ in first.losses()] == list(range(1, 11)) and first.checkpoints() == [10]


NEEDS_GPU = "needs a GPU and this runs on cpu; type"
MISTAKES = [
    pytest.param(
        "run.dir=FILE", "FILE/run cannot be written (Not a directory); make room or", id="a run folder in a file"
    ),
    pytest.param("checkpoint.load=FILE", "checkpoint.load=FILE: FILE holds no whole checkpoint;", id="nothing to load"),
    pytest.param(
        "train.precision=fp8_block", f"{NEEDS_GPU} train.precision=auto", id="fp8 on a CPU", marks=without_gpu
    ),
    pytest.param("model.backend=te", f"{NEEDS_GPU} model.backend=auto", id="te on a CPU", marks=without_gpu),
]


@pytest.mark.parametrize(("override", "message"), MISTAKES)
def test_a_mistake_is_refused_before_anything_is_tokenised(override: str, message: str, tmp_path: Path) -> None:
    file, cache = tmp_path / "notes.txt", tmp_path / "cache"
    file.touch()
    job = warm.start(tmp_path, "run", f"data.cache={cache}", override.replace("FILE", str(file)))
    assert job.wait() == [2], job.output()
    assert message.replace("FILE", str(file)) in job.output() and "Traceback" not in job.output()
    assert "data:" not in job.output() and not cache.exists()


def test_a_damaged_checkpoint_is_walked_past_with_a_clear_line(runs: tuple[Path, str, str]) -> None:
    folder, _, _ = runs
    root = folder / "halves" / "checkpoints"
    newest = disk.list_checkpoints(root)[-1].path
    victim = max(newest.glob("*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    said: list[str] = []
    found = disk.newest_good(root, said.append)
    assert found is not None and found.step == 5
    assert victim.name in said[0] and "checksum" in said[0]
    victim.write_bytes(data[:-7])
    with pytest.raises(CheckpointError, match=r"bytes, the manifest says"):
        disk.verify(newest)


def test_an_unfinished_save_is_never_the_latest(tmp_path: Path) -> None:
    good = disk.writing_folder(tmp_path, 3)
    good.mkdir(parents=True)
    (good / "shard").write_bytes(b"123")
    disk.finish(good, disk.step_folder(tmp_path, 3), {"step": 3})
    killed = disk.writing_folder(tmp_path, 4)
    killed.mkdir()
    (killed / "shard").write_bytes(b"12")
    found = disk.newest_good(tmp_path, print)
    assert found is not None and found.step == 3
    assert disk.clear_unfinished(tmp_path) == [killed] and not killed.exists()


def test_pruning_keeps_the_last_and_the_multiples(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        folder = disk.writing_folder(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / "shard").write_bytes(b"x")
        disk.finish(folder, disk.step_folder(tmp_path, step), {"step": step})
    disk.prune(tmp_path, keep_last=2, keep_every=20)
    assert [f.step for f in disk.list_checkpoints(tmp_path)] == [20, 40, 50]
