"""`k3train convert` both ways: the other engine goes on where one stopped; both runs export the same model."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from k3train.config.compose import load_resolved, save_resolved
from k3train.engine import universal
from k3train.engine.deepspeed_convert import convert_run
from k3train.errors import CheckpointError, ConfigError
from k3train.train import checkpoint as disk
from tests.engine.deepspeed_cases import SHORT
from tests.parallel.pool import pool
from tests.parallel.tiny import tiny_config

pytestmark = pytest.mark.ops
CASES = "tests.engine.deepspeed_cases:"


@pytest.fixture(autouse=True)
def _deepspeed_is_installed() -> None:
    pytest.importorskip("deepspeed", reason="the extra deepspeed is not installed")


def sealed(run: Path, engine: str) -> Path:
    """The run's configuration and the final folder of the checkpoint that lies in its writing folder."""
    config = copy.deepcopy(tiny_config(SHORT))
    config.engine.name, config.run.name, config.run.dir = engine, run.name, str(run.parent)
    config.parallel.distributed_optimizer = engine == "megatron"
    save_resolved(config, run / "config.yaml")
    final = disk.step_folder(run / "checkpoints", 2)
    disk.finish(disk.writing_folder(run / "checkpoints", 2), final, {"step": 2, "model": "tiny", "run": run.name})
    return final


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, one_rank: Any) -> tuple[Path, list[Any], list[Any]]:
    """A run of two steps of each engine, and what the two steps after those look like."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("megatron", "zero"):
        (root / name / "checkpoints").mkdir(parents=True)
    writing = disk.writing_folder(root / "megatron" / "checkpoints", 2)
    writing.mkdir()
    pool(2).run(CASES + "megatron_steps", load=None, save=str(writing), steps=(0, 2), timeout=100)
    final = sealed(root / "megatron", "megatron")
    (after, _) = pool(2).run(CASES + "megatron_steps", load=str(final), save=None, steps=(2, 4), timeout=100)
    writing = disk.writing_folder(root / "zero" / "checkpoints", 2)
    (after_zero, _) = pool(2).run(CASES + "save_and_go_on", stage=3, folder=str(writing), timeout=100)
    sealed(root / "zero", "deepspeed")
    return root, after, after_zero


def test_deepspeed_goes_on_with_a_run_of_megatron(runs: tuple[Path, list[Any], list[Any]]) -> None:
    root, after, _ = runs
    final = convert_run(root / "megatron", root / "to-zero", "deepspeed")
    disk.verify(final)
    assert universal.is_universal(final) and load_resolved(root / "to-zero" / "config.yaml").engine.name == "deepspeed"
    (got, _) = pool(2).run(CASES + "zero_steps", stage=3, load=str(final), steps=(2, 4), timeout=100)
    for one, other in zip(got, after, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_megatron_goes_on_with_a_run_of_deepspeed(runs: tuple[Path, list[Any], list[Any]]) -> None:
    """By the command, in a process of its own: this one has the CPU's adapter already."""
    root, _, after = runs
    words = ["convert", str(root / "zero"), "--to", "megatron", "--output", str(root / "to-megatron")]
    done = subprocess.run([sys.executable, "-m", "k3train.cli", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "k3train train run.name=to-megatron" in done.stdout
    final = disk.newest_good(root / "to-megatron" / "checkpoints", print)
    assert final is not None and final.step == 2
    (got, _) = pool(2).run(CASES + "megatron_steps", load=str(final.path), save=None, steps=(2, 4), timeout=100)
    for one, other in zip(got, after, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_deepspeed_run_exports_the_model_that_its_converted_run_exports(
    runs: tuple[Path, list[Any], list[Any]],
) -> None:
    from k3train.weights.commands import export

    root, _, _ = runs
    if not (root / "to-megatron").is_dir():
        convert_run(root / "zero", root / "to-megatron", "megatron")
    exported = []
    for name in ("zero", "to-megatron"):
        config = load_resolved(root / name / "config.yaml")
        config.model.mla.latent_eps = 1e-6  # what the format's clients compute with; the tests' models have a large one
        save_resolved(config, root / name / "config.yaml")
        config.export.source, config.export.output = str(root / name), str(root / f"hf-{name}")
        assert export(config) == 0
        exported.append(
            {k: v for f in Path(config.export.output).glob("*.safetensors") for k, v in load_file(f).items()}
        )
    left, right = exported
    assert left.keys() == right.keys() and len(left) > 50
    assert all(bool((left[name] == right[name]).all()) for name in left)


def test_what_cannot_be_converted_is_refused_with_what_to_type(runs: tuple[Path, list[Any], list[Any]]) -> None:
    root, _, _ = runs
    with pytest.raises(ConfigError, match="type --to megatron"):
        convert_run(root / "zero", root / "again", "deepspeed")
    with pytest.raises(ConfigError, match="--output OTHER"):
        convert_run(root / "zero", root / "megatron", "megatron")
    with pytest.raises(CheckpointError, match="k3train convert"):
        universal.read_about(disk.step_folder(root / "megatron" / "checkpoints", 2))
