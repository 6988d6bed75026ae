"""One arm of a comparison: the run that `k3train train` with the same overrides makes, in memory.

No checkpoints, pictures or W&B; what is kept is one record of numbers.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from k3train.config.schema import Config
from k3train.engine.base import StepResult
from k3train.train.loop import Callback, Trainer

POINTS = 40  # of a curve that are kept


class Recorder(Callback):
    """Loss, seconds and, with experts, MaxVio of every step; what was measured on held-out data."""

    def __init__(self) -> None:
        self.loss: list[float] = []
        self.seconds: list[float] = []
        self.max_vio: list[float] = []
        self.valid: list[list[float]] = []  # [step, loss] or [step, loss, accuracy]
        self.skipped = 0

    def on_step(self, trainer: Trainer, result: StepResult, metrics: dict[str, Any]) -> None:
        self.loss.append(result.loss)
        self.seconds.append(metrics["train/step_seconds"])
        self.skipped += result.skipped
        if "moe/max_vio" in metrics:
            self.max_vio.append(metrics["moe/max_vio"])
        if "valid/loss" in metrics:
            row = [trainer.state.step, metrics["valid/loss"]]
            self.valid.append([*row, *(metrics[k] for k in ("valid/recall_accuracy",) if k in metrics)])


def train_arm(config: Config, suites: list[str]) -> dict[str, Any]:
    """Train `config` in this process, then answer the recall `suites`. Returns numbers that JSON holds.

    Raises ConfigError or DataError as `k3train train` does.
    """
    from k3train import launch, platform

    platform.install()
    import torch

    place = launch.init_distributed(config)
    torch.set_num_threads(config.train.threads or 1)
    platform.install_adam()
    if not torch.cuda.is_available():
        platform.keep_freed_memory()
    from k3train.engine.megatron import MegatronEngine
    from k3train.parallel import layout as layouts
    from k3train.train import recall
    from k3train.train.callbacks.evaluation import Evaluation
    from k3train.train.callbacks.statistics import ExpertLoad
    from k3train.train.data import prepare_data
    from k3train.train.state import RunState

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layout = layouts.initialize(layouts.sizes_from_config(config.parallel, place.world))
    data = prepare_data(config, layout, device, lambda _: None)
    engine = MegatronEngine(config, layout, device)
    recorder = Recorder()
    callbacks: list[Callback] = [ExpertLoad()]
    if data.held_out is not None:
        by_recall = recall.accuracy if data.tokenizer is None else None
        callbacks.append(Evaluation(config.train.eval_every, data.held_out, data.tokens_per_byte, None, by_recall))
    trainer = Trainer(config, engine, data.train, RunState(), [*callbacks, recorder], say=lambda _: None)
    begin = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - begin
    record: dict[str, Any] = {
        "parameters": sum(p.numel() for m in engine.models for p in m.parameters()),
        "steps": trainer.state.step, "tokens": trainer.state.consumed_tokens, "skipped": recorder.skipped,
        "seconds": round(seconds, 1), "step_seconds": round(sorted(recorder.seconds)[len(recorder.seconds) // 2], 4),
        "loss": thinned(recorder.loss), "valid": [[round(x, 5) for x in row] for row in recorder.valid],
        "device": describe(device),
    }  # fmt: skip
    if recorder.max_vio:
        record["max_vio"] = thinned(recorder.max_vio)
    if config.model.mixer == "kda":
        record["decay"] = decay_range(engine, data)
    if suites:
        record["accuracy"] = {suite: round(recall.suite_accuracy(engine, config, suite), 4) for suite in suites}
    return record


def thinned(values: list[float]) -> list[list[float]]:
    """[last step of the window, mean over the window] of at most POINTS windows."""
    width = -(-len(values) // POINTS)
    windows = [(min(i + width, len(values)), values[i : i + width]) for i in range(0, len(values), width)]
    return [[end, round(sum(part) / len(part), 5)] for end, part in windows]


def decay_range(engine: Any, data: Any) -> dict[str, float]:
    """How far KDA's decays reach on one held-out micro-batch, over layers: the lowest log decay of a token, its
    median, and the lowest sum over 16 tokens in a row, whose exponential a tile of the chunked form has to hold."""
    import torch

    seen: list[torch.Tensor] = []
    engine.set_probe(lambda name, value: seen.append(value.float()) if name.startswith("log_decay") else None)
    batches, _ = data.held_out()
    engine.evaluate(batches, 1)
    engine.set_probe(None)
    if not seen:
        return {}
    tiles = [g[: g.shape[0] // 16 * 16].unflatten(0, (-1, 16)).sum(1).min() for g in seen]
    return {
        "lowest": round(min(float(g.min()) for g in seen), 3),
        "median": round(float(torch.cat([g.flatten() for g in seen]).median()), 4),
        "lowest_of_16": round(min(float(t) for t in tiles), 2),
    }


def describe(device: Any) -> str:
    """The machine of a record."""
    import torch

    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    name = next(
        (line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "CPU",
    )
    return f"{name}, 1 thread, torch {torch.__version__}, {os.cpu_count()} cores"
