"""What needs no deepspeed: refusals that name the engine that can, the missing extra, the gate, the files."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from k3train.config.compose import compose
from k3train.engine import deepspeed, universal
from k3train.engine.deepspeed_gate import NormGate
from k3train.errors import CheckpointError, ConfigError, EnvironmentError_, WeightsError

REFUSED = {
    "tensor parallelism": (["parallel.tensor=2"], "parallel.tensor=2 .* type engine=megatron"),
    "pipeline parallelism": (["parallel.pipeline=2"], "parallel.pipeline=2 .* type engine=megatron"),
    "context parallelism": (["parallel.context=2"], "parallel.context=2 .* type engine=megatron"),
    "expert parallelism": (["parallel.expert=2", "train.micro_batch=1"], "parallel.expert=2 .* type engine=megatron"),
    "the distributed optimizer": (["parallel.distributed_optimizer=true"], "distributed_optimizer=true .* engine=megatron"),
    "megatron's overlap of reduction": (["parallel.overlap_grad_reduce=true"], "overlap_grad_reduce=true .* engine=megatron"),
    "Muon on the CPU": (["optim.name=muon", "engine.offload=cpu"], "optim.name=muon with engine.offload=cpu .* engine=megatron"),
    "QK-Clip": (["optim.qk_clip=100"], "optim.qk_clip=100.0 needs engine=megatron"),
    "multi-token prediction": (["model.mtp_layers=1"], "mtp_layers=1 .* engine=megatron"),
    "FP8": (["train.precision=fp8_block"], "engine=megatron"),
    "captured graphs": (["train.cuda_graphs=step"], "engine=deepspeed"),
    "a stage that does not exist": (["engine.zero_stage=0"], "engine.zero_stage=0 must be 1, 2 or 3"),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_zero_cannot_do_is_refused_at_compose_time(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(["engine=deepspeed", *overrides])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_stages_and_offload_compose(stage: int, offload: str) -> None:
    config = compose(["engine=deepspeed", f"engine.zero_stage={stage}", f"engine.offload={offload}"])
    assert (config.engine.zero_stage, config.engine.offload) == (stage, offload)
    assert not config.parallel.distributed_optimizer


def test_a_missing_extra_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "deepspeed" else real(name, *a))
    with pytest.raises(EnvironmentError_, match="uv sync --extra deepspeed.* or engine=megatron"):
        deepspeed.require()


class FakeZero:
    """The two doors of ZeRO's optimizers that the gate stands in."""

    def __init__(self, norm: float) -> None:
        self.norm = norm

    def scaled_global_norm(self, norm_type: int = 2) -> torch.Tensor:
        return torch.tensor(self.norm)


@pytest.mark.parametrize("scale", [1.0, 1.25, 0.75])
@pytest.mark.parametrize(
    ("norm", "limit", "refused"), [(2.0, 3.0, False), (4.0, 3.0, True), (math.inf, math.inf, True)]
)
def test_a_refused_norm_is_shown_to_zero_as_infinite(norm: float, limit: float, refused: bool, scale: float) -> None:
    """The norm is judged and kept without the scale; what passes is shown as ZeRO measured it, which divides by it."""
    zero: Any = FakeZero(norm * scale)
    gate = NormGate(zero, stage=2)
    gate.limit, gate.scale = limit, scale
    shown = float(zero.scaled_global_norm())
    assert (gate.norm, gate.refused) == (norm, refused)
    assert shown == (math.inf if refused else norm * scale) and zero.check_grad_overflow


def write(folder: Path, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
    for name, content in universal.files(tensors, 7.0):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, folder / name)
    (folder / universal.ABOUT).write_text(universal.about({"step": 7}, optimizer=True, dtype="bf16"))


def test_a_universal_checkpoint_is_a_source_of_weights(tmp_path: Path) -> None:
    weights = torch.randn(3, 2, 4)
    write(tmp_path, {"layers.0.w": {"fp32": weights, "exp_avg": weights + 1}})
    assert universal.is_universal(tmp_path) and universal.read_about(tmp_path)["state"] == {"step": 7}
    source = universal.UniversalSource(tmp_path)
    assert source.names() == ["layers.0.w"] and source.shape("layers.0.w") == (3, 2, 4)
    assert torch.equal(source.read("layers.0.w"), weights) and torch.equal(source.read("layers.0.w", 1), weights[1])
    assert torch.equal(universal.read(tmp_path, "layers.0.w", "exp_avg"), weights + 1)
    assert float(universal.read(tmp_path, "layers.0.w", "step")) == 7.0
    with pytest.raises(WeightsError, match="no tensor other"):
        source.read("other")
    with pytest.raises(CheckpointError, match="checkpoint.load_optimizer=false"):
        universal.read(tmp_path, "layers.0.w", "momentum_buffer")


class Runs:
    """An object whose unpickling would make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    write(tmp_path, {"w": {"fp32": torch.zeros(1)}})
    torch.save({"param": Runs(tmp_path / "ran")}, tmp_path / universal.file_of("w", "fp32"))
    with pytest.raises(CheckpointError, match="cannot be read"):
        universal.read(tmp_path, "w")
    assert not (tmp_path / "ran").exists()
