"""`generate` and `evaluate` as a user types them, on a run that was just trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3train.inference.cache import bytes_per_token


def k3train(*words: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "k3train.cli", *words], capture_output=True, text=True, env=env, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("runs")
    where = [f"run.dir={folder}", "run.name=small"]
    k3train("train", "train=smoke", "train.steps=2", "tracking=disabled", "train.sample_tokens=0", *where)
    return where


def test_generate_continues_the_prompt(run: list[str]) -> None:
    out = k3train("generate", *run, "generate.prompt='import os'", "generate.max_tokens=4")
    assert out.startswith("import os") and len(out) > len("import os\n")


def test_generate_takes_a_file_of_prompts(run: list[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f\n\nclass G(\n")
    out = k3train("generate", *run, f"generate.prompts_file={prompts}", "generate.max_tokens=3", "generate.temperature=1.0")
    assert out.count("-" * 40) == 2 and "def f" in out and "class G(" in out


def test_evaluate_prints_and_keeps_what_it_measured(run: list[str]) -> None:
    out = k3train("evaluate", *run, "evaluate.samples=8")
    assert "bits per byte" in out
    kept = json.loads((Path(run[0].split("=")[1]) / "small" / "evaluation.json").read_text())
    assert kept["heldout"]["sequences"] == 8


def test_the_tiny_model_caches_its_three_full_layers() -> None:
    from k3train.config.compose import compose

    assert bytes_per_token(compose([]).model) == 3 * (32 + 16) * 2
