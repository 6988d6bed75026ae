"""train.profile: a trace that opens, and kernel time that is told by part of the model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from k3train.parallel.layout import Layout
from k3train.train import profiling
from k3train.train.callbacks.profiling import Profiling
from tests.parallel.tiny import tiny_config


@pytest.fixture(scope="module")
def traced(one_rank: Layout, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A tiny run of three steps, of which the second is traced; the folder and what was said."""
    from k3train.engine.megatron import MegatronEngine
    from tests.parallel.tiny import micro_batch

    config = tiny_config({"model.pattern": "KF", "train.global_batch": 2})
    engine = MegatronEngine(config, one_rank, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    said: list[str] = []
    folder = tmp_path_factory.mktemp("profile") / "profile"
    callback = Profiling("2:3", folder)
    trainer: Any = SimpleNamespace(engine=engine, state=SimpleNamespace(step=0), say=said.append)
    for _ in range(3):
        callback.before_step(trainer)
        result = engine.step(iter([micro_batch([0, 1], seed=1)]), 1e-4, 1)
        trainer.state.step += 1
        callback.on_step(trainer, result, {})
    callback.close(trainer)
    return folder, said


def test_the_trace_holds_one_step_with_its_parts_as_ranges(traced: tuple[Path, list[str]]) -> None:
    folder, said = traced
    names = [e["name"] for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if "name" in e]
    assert names.count("part: KDA") == 1  # one K layer, one micro-batch, one step
    assert names.count("part: optimizer") == 1
    assert len(said) == 1
    assert str(folder) in said[0]


def test_forward_and_backward_are_told_by_part(traced: tuple[Path, list[str]]) -> None:
    folder, said = traced
    split = profiling.read_trace(folder / "trace.json")
    wanted = {"embedding", "KDA", "MLA", "router", "experts", "head and loss", "attention residuals", "optimizer",
              "balancing", profiling.GRADIENTS}  # fmt: skip
    assert wanted <= set(split.parts)
    assert split.parts.get(profiling.REST, 0.0) < 0.5 * sum(split.parts.values())
    backward = [name for part, name in split.kernels if part == "KDA" and "Backward" in name]
    assert torch.cuda.is_available() or backward  # on a CPU the operators of backward carry its name
    assert 0.0 < split.busy <= split.wall * 1.0001
    assert "KDA" in (folder / "split.txt").read_text()
    assert "KDA" in said[0]


def test_nothing_of_the_ranges_stays_behind(traced: tuple[Path, list[str]], one_rank: Layout) -> None:
    from k3train.engine import gradients
    from k3train.engine.megatron import MegatronEngine

    engine = MegatronEngine(tiny_config({"model.pattern": "KF"}), one_rank, torch.device("cpu"))
    before = gradients.balance
    with profiling.annotated(engine):
        assert gradients.balance is not before
    assert gradients.balance is before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in engine.models[0].modules())


def test_idle_stretches_are_told_by_what_the_host_did_meanwhile(tmp_path: Path) -> None:
    def event(kind: str, name: str, begin: float, end: float, thread: int, **args: int) -> dict[str, Any]:
        return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, "tid": thread, "args": args}

    events = [
        event("kernel", "first", 0, 100, 7, correlation=1),
        event("kernel", "beside it", 50, 120, 8, correlation=2),
        event("kernel", "second", 1120, 1200, 7, correlation=3),
        event("kernel", "third", 1300, 1400, 7, correlation=4),
        event("cpu_op", "attention", 10, 1110, 1),
        event("cuda_runtime", "cudaMalloc", 400, 900, 1),
        event("cpu_op", "an older one of another thread", 0, 1150, 2),
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    split = profiling.read_trace(tmp_path / "trace.json")
    assert split.gaps == {"cudaMalloc": 1.0, "Python between operations": 0.1}
    assert split.waited_for().splitlines()[0].split() == ["1.00", "ms", "idle", "during", "cudaMalloc"]
    assert split.idle == pytest.approx(1.1 / 1.4)
