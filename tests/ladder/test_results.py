"""docs/results.md shows what its records say, and a comparison goes on where it was stopped."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from k3train.config.compose import compose
from k3train.inference.cache import new_cache
from k3train.ladder import arms, pool, tables

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return tables.tables(FOLDER)


def test_the_page_shows_every_table_as_its_records_make_it(made: dict[str, str]) -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    assert {name for _, name, _ in tables.BLOCK.findall(page)} == set(made)
    assert tables.fill(page, made) == page, "run python benchmarks/results.py write"


def test_the_page_shows_every_picture() -> None:
    shown = set(re.findall(r"\]\(results/(\w+\.png)\)", (ROOT / "docs" / "results.md").read_text()))
    assert shown == {path.name for path in FOLDER.glob("*.png")}


def test_the_page_names_experiments_that_exist() -> None:
    named = set(re.findall(r"experiment=(\w+)", (ROOT / "docs" / "results.md").read_text()))
    assert {f"ablation_{kind}" for kind in arms.ABLATIONS} <= named
    assert [name for name in named if not (ROOT / "conf" / "experiment" / f"{name}.yaml").is_file()] == []


@pytest.mark.parametrize("name", arms.COMPARISONS)
def test_records_are_of_arms_as_they_are_now(name: str) -> None:
    now = {arm.key for arm in arms.COMPARISONS[name](3)}
    kept = [(r["group"], r["arm"], r["seed"], r["key"]) for r in pool.records(FOLDER / f"{name}.jsonl")]
    assert len(set(kept)) == len(kept) and set(kept) <= now


def record(arm: str, seed: int, loss: float, **more: Any) -> dict[str, Any]:
    return {"group": "ablation", "arm": arm, "seed": seed, "parameters": 7, "valid": [[1, 9.0], [2, loss]], **more}


def test_a_table_tells_the_spread_and_the_difference_seed_by_seed() -> None:
    found = [record("baseline", 1, 2.0), record("baseline", 2, 3.0)]
    found += [record("optimizer: AdamW", 2, 3.5), record("optimizer: AdamW", 1, 2.25)]
    lines = tables.ablation_table(found, "optimizer").splitlines()
    assert lines[2] == "| per-head Muon (baseline) | 2.5000 (2.0000 to 3.0000) |  | 2 |"
    assert lines[3] == "| whole-matrix Muon | not run | not run | 0 |"
    assert lines[4] == "| AdamW | 2.8750 (2.2500 to 3.5000) | 0.3750 (0.2500 to 0.5000) | 2 |"


@pytest.mark.parametrize("hybrid", ["none", "3:1"])
def test_memory_for_decoding_is_that_of_the_cache(hybrid: str) -> None:
    model = compose([f"model.hybrid={hybrid}"]).model
    for tokens in (1, 300):
        held = new_cache(model, 1, tokens, dtype=torch.bfloat16).bytes()
        assert tables.decode_bytes(model, tokens) == held


def test_memory_grows_with_the_length_for_attention_alone() -> None:
    for name in arms.MIXERS:
        model = compose(["model.hybrid=none", *arms.mixer(name)]).model
        grows = tables.decode_bytes(model, 2000) > tables.decode_bytes(model, 1000)
        assert grows == (name in ("softmax", "hybrid")), name


def test_what_has_a_record_is_not_trained_again(tmp_path: Path) -> None:
    arm = arms.ablations(1)[:3]
    file = pool.file_of(arm[0], tmp_path)
    assert pool.missing(arm, tmp_path) == arm
    group, name, seed, key = arm[1].key
    done = {"group": group, "arm": name, "seed": seed, "key": key}
    file.write_text(json.dumps(done) + "\n" + json.dumps({**done, "arm": arm[0].name})[:20])
    assert pool.missing(arm, tmp_path) == [arm[0], arm[2]]


def test_how_a_machine_computes_is_recorded_and_not_part_of_what_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3train.ladder import train

    seen = []
    monkeypatch.setattr(train, "train_arm", lambda config, suites: seen.append(config) or {"loss": [[1, 2.0]]})
    arm = arms.recall(1)[0]
    plain, other = pool.run_arm(arm), pool.run_arm(arm, also=["model.backend=torch", "train.seq_length=64"])
    assert seen[1].model.backend == "torch" and seen[1].train.seq_length == 64
    assert other.pop("also") == "model.backend=torch train.seq_length=64" and other == plain


def test_captured_steps_are_left_out_for_the_mixer_that_no_graph_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3train.ladder import train

    seen = {}
    monkeypatch.setattr(train, "train_arm", lambda config, suites: seen.update({config.model.mixer: config}) or {})
    by_mixer = {arm.name: arm for arm in arms.recall(1)}
    captured = [pool.run_arm(by_mixer[name], also=["train.cuda_graphs=step"]) for name in ("linear", "delta")]
    assert (seen["linear"].train.cuda_graphs, seen["delta"].train.cuda_graphs) == ("none", "step")
    assert [record.get("also") for record in captured] == [None, "train.cuda_graphs=step"]


@pytest.mark.ops
def test_arms_can_be_forked_where_there_is_a_gpu() -> None:
    """With a GPU as the driver's library tells of one, importing what arms need asks CUDA itself nothing."""
    import os
    import subprocess
    import sys

    program = """
import torch

def asked(*_):
    raise RuntimeError("CUDA was asked")

torch.cuda._device_count_nvml = lambda: 1
torch._C._cuda_getDeviceCount = torch._C._cuda_init = asked
import k3train.ladder.preload
print(torch.cuda.is_available(), torch.cuda.is_initialized())
"""
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT,
        env={**env, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.ops
def test_an_arm_is_the_run_of_its_words(tmp_path: Path) -> None:
    """Two steps through the pool and two through `k3train train` have equal losses; a second call trains nothing."""
    import os
    import shlex
    import subprocess
    import sys

    short = ("train.steps=2", "train.eval_every=1", "train.eval_samples=16")
    arm = arms.Arm("overwrite", "kda", ("experiment=ladder", *short), 5, ("recall:overwrite,pairs=2,rewrites=2",))
    said: list[str] = []
    assert pool.run_all([arm], tmp_path, say=said.append) == 0
    assert pool.run_all([arm], tmp_path, say=said.append) == 0
    (kept,) = pool.records(tmp_path / "recall.jsonl")
    assert "0 to train" in said[-1] and 0 <= kept["accuracy"][arm.suites[0]] <= 1
    words = [*shlex.split(kept["words"]), f"run.dir={tmp_path}", "run.name=same", "tracking=disabled"]
    command = [sys.executable, "-m", "k3train.cli", "train", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "same" / "metrics.jsonl").read_text().splitlines()]
    assert [round(r["train/loss"], 4) for r in lines if "train/loss" in r] == [round(x, 4) for _, x in kept["loss"]]
