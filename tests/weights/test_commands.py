"""The commands as a user types them: train, export, quantize, import into another layout, export again, train on."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from k3train.config.compose import compose
from k3train.errors import ConfigError, WeightsError
from k3train.weights import commands
from k3train.weights.quantize import REPORT
from k3train.weights.quantizing import folders, run_quantize
from k3train.weights.reader import HFFolder
from tests.weights.helpers import golden_config, golden_folder

MODEL = ["model=k3_tiny", "model.vocab_size=320", "model.pattern=KKKF"]


def k3train(*words: str, cwd: Path) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1", "K3TRAIN_CACHE": str(cwd / "cache")}
    command = [sys.executable, "-m", "k3train.cli", *words]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def shards(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.safetensors")}


@pytest.mark.ops
def test_a_run_leaves_shrinks_and_comes_back_into_another_layout(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        lines = [f"def f{i}_{j}(x):\n    return x * {j} + {i}\n" for j in range(60)]
        (text / f"{i}.py").write_text("\n".join(lines))
    data = [f"data.corpus={text}", "data.validation_fraction=0.2", "tracking.wandb=disabled"]
    k3train("train", *MODEL, *data, "train=smoke", "train.steps=2", "run.name=first", cwd=tmp_path)
    k3train("export", "run.name=first", cwd=tmp_path)
    first = tmp_path / "runs" / "first" / "hf"
    assert HFFolder(first).format == "kimi_k3"
    shown = k3train("quantize", "run.name=first", "quantize.workers=2", "export.shard_bytes=300000", cwd=tmp_path)
    assert "top-1 agreement" in shown
    report = json.loads((first.with_name("hf-mxfp4") / REPORT).read_text())
    assert report["model"]["tokens"] > 0 and len(report["outputs"]) == 3
    packed = first.with_name("hf-mxfp4")
    wrote = k3train("generate", f"source={packed}", "prompt=def f", "max_tokens=4", cwd=tmp_path)
    assert wrote.startswith("def f") and len(wrote) > len("def f\n")
    suites = 'suites=[heldout,"recall:overwrite,pairs=2,rewrites=2"]'
    shown = k3train("evaluate", f"source={packed}", suites, "samples=4", *data, cwd=tmp_path)
    assert "bits per byte" in shown and re.search(r"recall:overwrite.*accuracy.*\[0\.\d+, \d\.\d+\]", shown)
    shown = k3train("import", f"source={first}", "run.name=second", "parallel.tensor=2", cwd=tmp_path)
    k3train("export", "run.name=second", cwd=tmp_path)
    assert shards(tmp_path / "runs" / "second" / "hf") == shards(first)
    told = re.search(r"k3train (train run.name=second)", shown)
    assert told is not None, shown
    more = [*data, "train=smoke", "train.steps=1"]
    k3train(*told[1].split(), *more, cwd=tmp_path)
    assert (tmp_path / "runs" / "second" / "checkpoints" / "step-00000001").is_dir()


def test_quantising_a_run_that_was_not_exported_says_what_to_type(tmp_path):
    config = compose([f"run.dir={tmp_path}", "run.name=mine"])
    with pytest.raises(WeightsError, match=r"k3train export run.name=mine"):
        run_quantize(config)


def test_importing_needs_a_source(tmp_path):
    with pytest.raises(ConfigError, match="source=FOLDER"):
        commands.import_(compose([f"run.dir={tmp_path}"]))


def test_the_imported_model_replaces_the_one_of_the_command_line_and_is_checked_against_the_layout(tmp_path):
    source = golden_folder(tmp_path)
    config = commands.imported_config(compose(["run.name=x", "model.balancing=sign"]), source)
    assert (config.model.hidden_size, config.model.pattern, config.model.balancing) == (64, "KKKF*2 F", "sign")
    with pytest.raises(ConfigError, match="experts=8"):
        commands.imported_config(compose(["parallel.expert=16", "parallel.world=16", "train.global_batch=64"]), source)
    assert golden_config()["text_config"]["num_experts"] == 8


@pytest.mark.parametrize(("format", "name"), [("mxfp4", "hf-mxfp4"), ("bf16", "hf-mxfp4-bf16")])
def test_the_quantised_folder_lies_beside_the_export(format, name):
    source, output = folders(compose(["run.name=r", f"quantize.format={format}"]))
    assert (source, output) == (Path("runs/r/hf"), Path(f"runs/r/{name}"))


def test_a_run_or_its_export_can_be_named_as_the_source(tmp_path):
    golden_folder(tmp_path / "run" / "hf")
    for named in (tmp_path / "run", tmp_path / "run" / "hf"):
        source, output = folders(compose([f"quantize.source={named}"]))
        assert (source, output) == (tmp_path / "run" / "hf", tmp_path / "run" / "hf-mxfp4")
