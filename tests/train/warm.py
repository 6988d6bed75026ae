"""Training runs forked from a process that has imported everything: a run of a few steps costs seconds, so many can be
killed. Inside is the real `run_training` with real ranks over gloo; only the start of the interpreter is saved.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3train.launch import free_port

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "train=smoke", "train.seq_length=64", "train.eval_samples=2", "train.sample_tokens=0", "train.threads=1",
    "tracking.wandb=disabled", "checkpoint.every=1000", "model.pattern='KF'", "model.dense_layers=1",
    "model.hidden_size=64",
)  # fmt: skip


@dataclass
class Job:
    """The ranks of one run."""

    folder: Path
    name: str
    processes: list[Any]
    outputs: list[Path]

    @property
    def run(self) -> Path:
        return self.folder / self.name

    def wait(self, seconds: float = 120.0) -> list[int]:
        """Exit codes in rank order (-9 for a killed rank). Raises AssertionError with the output when not over."""
        until = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        if any(process.exitcode is None for process in self.processes):
            said = self.output()
            self.kill()
            raise AssertionError(f"the run was not over after {seconds:.0f} s:\n{said}")
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
            process.join()

    def send(self, number: int, rank: int | None = None) -> None:
        for process in self.processes if rank is None else [self.processes[rank]]:
            if process.exitcode is None:
                os.kill(process.pid, number)

    def output(self) -> str:
        return "\n".join(f"--- rank {i}\n{path.read_text()}" for i, path in enumerate(self.outputs) if path.exists())

    def wait_for(self, what: str, seconds: float = 60.0, ranks: int = 1) -> None:
        """Until the output of so many ranks holds `what`."""
        until = time.monotonic() + seconds
        while self.output().count(what) < ranks:
            assert time.monotonic() < until, f"{what!r} was never said:\n{self.output()}"
            assert any(p.exitcode is None for p in self.processes), f"the run ended first:\n{self.output()}"
            time.sleep(0.02)

    def steps(self) -> list[dict[str, Any]]:
        """Records of metrics.jsonl that hold a loss."""
        return [record for record in self.records() if "train/step_seconds" in record]

    def records(self) -> list[dict[str, Any]]:
        file = self.run / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def losses(self) -> list[tuple[int, float]]:
        return [(r["step"], r["train/loss"]) for r in self.steps() if "train/loss" in r]

    def checkpoints(self) -> list[int]:
        found = (self.run / "checkpoints").glob("step-*/manifest.json")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def start(
    folder: Path, name: str, *overrides: str, world: int = 1, inject: str | None = None, **values: Any
) -> Job:  # fmt: skip
    """Start a run of `world` ranks. `inject` names "module:function", called with `values` in each rank before it."""
    folder.mkdir(parents=True, exist_ok=True)
    context = _context()
    words = [*SMALL, f"run.dir={folder}", f"run.name={name}", *overrides]
    port = free_port()
    outputs = [folder / f"{name}.rank{rank}.out" for rank in range(world)]
    processes = []
    for rank in range(world):
        outputs[rank].unlink(missing_ok=True)
        process = context.Process(
            target=_rank, args=(words, rank, world, port, str(outputs[rank]), inject, values), daemon=True
        )
        process.start()
        processes.append(process)
    return Job(folder, name, processes, outputs)


def _context() -> Any:
    paths = [str(ROOT), *[p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.warm_imports"])
    return context


def _rank(
    words: list[str], rank: int, world: int, port: int, output: str, inject: str | None, values: dict[str, Any]
) -> None:
    """The life of one rank, as `k3train train` would live it."""
    from k3train import launch, signals
    from k3train.config.compose import compose
    from k3train.train.run import run_training

    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    for number in (signal.SIGINT, signal.SIGTERM):  # multiprocessing's children ignore the first
        signal.signal(number, signal.SIG_DFL)
    signals.listen()
    if world > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
    if inject is not None:
        module, function = inject.split(":")
        call: Callable[..., None] = getattr(importlib.import_module(module), function)
        call(**values)
    code = launch.report("train", lambda: run_training(compose(words)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
