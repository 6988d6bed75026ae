"""`generate` and `evaluate` as a user types them, on a run that was just trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from k3train.inference.cache import bytes_per_token
from k3train.inference.commands import pieces


def started(*words: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "k3train.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip


def said(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, out + err
    return out


def k3train(*words: str, **env: str) -> str:
    return said(started(*words, **env))


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
    out = k3train(
        "generate", *run, f"generate.prompts_file={prompts}", "generate.max_tokens=3", "generate.temperature=1.0"
    )
    assert out.count("-" * 40) == 2 and "def f" in out and "class G(" in out


def test_text_streams_token_by_token_and_never_by_half_a_character() -> None:
    given, known = [], []

    def tokens() -> Iterator[int]:
        for byte in "aé🙂z".encode():
            given.append(byte)
            yield byte

    for piece in pieces(lambda ids: bytes(ids).decode(errors="replace"), tokens()):
        known.append((len(given), piece))
    assert known == [(1, "a"), (2, ""), (3, "é"), (4, ""), (5, ""), (6, ""), (7, "🙂"), (8, "z")]


def test_evaluate_prints_and_keeps_what_it_measured(run: list[str]) -> None:
    out = k3train("evaluate", *run, "evaluate.samples=8")
    assert "bits per byte" in out
    kept = json.loads((Path(run[0].split("=")[1]) / "small" / "evaluation.json").read_text())
    assert kept["heldout"]["sequences"] == 8


def test_the_tiny_model_caches_its_three_full_layers() -> None:
    from k3train.config.compose import compose

    assert bytes_per_token(compose([]).model) == 3 * (32 + 16) * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_continues_and_evaluates_a_run_its_exported_folder_and_its_packed_experts(tmp_path: Path) -> None:
    """Trained, exported and quantised without the GPU; more tokens than are decoded before a step is captured."""
    where, folder = [f"run.dir={tmp_path}", "run.name=small"], tmp_path / "small"
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "4"}
    smoke = ["train=smoke", "train.steps=2", "tracking=disabled", "train.sample_tokens=0"]
    k3train("train", *smoke, *where, **hidden)
    k3train("export", *where, **hidden)
    quantizing = started("quantize", *where, **hidden)
    wanted = ["prompt=import", "max_tokens=24"]
    both = [started("generate", f"source={source}", *wanted) for source in (folder, folder / "hf")]
    assert said(quantizing)
    packed = f"source={folder / 'hf-mxfp4'}"
    evaluating = [started("evaluate", source, "samples=4") for source in (f"source={folder}", packed)]
    texts = [*map(said, both), k3train("generate", packed, *wanted)]
    assert all(text.startswith("import") and len(text) > len("import\n") for text in texts), texts
    assert all("bits per byte" in text for text in map(said, evaluating))
