"""Ten steps on synthetic recall: no tokenizer, no sample, an accuracy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3train.config.compose import compose
from k3train.errors import DataError
from k3train.train import recall

TASK = 'data.corpus="recall:overwrite,pairs=4,rewrites=2"'
WORDS = ["train=smoke", "model.vocab_size=256", "tracking.wandb=disabled", "model.pattern=KF"]


def k3train(verb: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "k3train.cli", verb, f"run.dir={folder}", "run.name=recall", TASK, *overrides]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, capture_output=True, text=True, env=env, timeout=300, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("runs")
    done = k3train("train", folder, *WORDS, "train.eval_every=5", "model.mixer=delta")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_accuracy_on_held_out_episodes_is_logged_without_bits_per_byte(run: tuple[Path, str]) -> None:
    folder, out = run
    lines = [json.loads(line) for line in (folder / "recall" / "metrics.jsonl").read_text().splitlines()]
    measured = {m["step"]: m for m in lines if "valid/loss" in m}
    assert list(measured) == [5, 10]
    for metrics in measured.values():
        assert 0 <= metrics["valid/recall_accuracy"] <= 1
        assert "valid/bits_per_byte" not in metrics
    assert "held-out recall accuracy" in out


def test_there_is_no_tokenizer_and_no_sample(run: tuple[Path, str]) -> None:
    folder, out = run
    names = {path.name for path in (folder / "recall").iterdir()}
    assert "loss.png" in names and not names & {"tokenizer.json", "sample.txt"}
    assert "sample:" not in out and "k3train evaluate" in out


def test_a_vocabulary_without_room_for_the_keys_is_refused() -> None:
    config = compose([TASK, "train=smoke", "model.vocab_size=70"])
    with pytest.raises(DataError, match="vocab_size=70 leaves"):
        recall.datasets(config)
