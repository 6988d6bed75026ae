"""Verbs that take words: reports, checkpoints, `data prepare`."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3train import commands
from k3train.config.compose import compose
from k3train.errors import CheckpointError, ConfigError, DataError
from k3train.train import checkpoint as disk


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run `runs/a` with three checkpoints of one file each."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs/a/checkpoints"
    for step in (10, 20, 30):
        writing = disk.writing_folder(root, step)
        writing.mkdir(parents=True)
        (writing / "shard").write_text(f"weights of {step}")
        disk.finish(writing, disk.step_folder(root, step), {"step": step})
    return tmp_path / "runs/a"


def test_list_shows_each_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.checkpoint_list(["a"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["10", "20", "30"]


def test_verify_names_the_damaged_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.checkpoint_verify(["runs/a"]) == 0
    (run / "checkpoints/step-00000020/shard").write_text("weights of 2O")
    assert commands.checkpoint_verify(["runs/a"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [("DAMAGED" in line) for line in out[3:]] == [False, True, False]


def test_prune_keeps_the_newest_and_the_milestones(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.checkpoint_prune(["a", "--keep-last", "1", "--keep-every", "10"]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert commands.checkpoint_prune(["a", "--keep-last", "1"]) == 0
    assert [found.step for found in disk.list_checkpoints(run / "checkpoints")] == [30]


@pytest.mark.parametrize(
    ("call", "words", "error", "message"),
    [
        (commands.checkpoint_list, ["b"], ConfigError, "runs/ holds a"),
        (commands.checkpoint_list, [], ConfigError, "required: RUN"),
        (commands.checkpoint_prune, ["a", "--keep-lst", "1"], ConfigError, "unrecognized arguments"),
        (commands.report, [], ConfigError, "required: RUN"),
        (commands.replay, ["a", "--mode", "onlin"], ConfigError, "invalid choice"),
    ],
)
def test_mistakes_are_sentences(
    run: Path, call: object, words: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(words)  # type: ignore[operator]


def test_a_run_without_checkpoints_is_said_to_have_none(run: Path) -> None:
    Path("runs/empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        commands.checkpoint_list(["empty"])


def test_prepare_needs_something_to_read() -> None:
    with pytest.raises(ConfigError, match="data prepare input="):
        commands.data_prepare(compose())


def test_prepare_refuses_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing-\*\.txt"):
        commands.data_prepare(compose([f"data.input={tmp_path}/nothing-*.txt"]))
