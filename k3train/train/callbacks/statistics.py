"""Numbers about the model itself: expert load, decays, which sources each sublayer reads, FLOP rates."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from k3train.engine.base import StepResult
from k3train.tracking.expert_load import load_metrics
from k3train.train.loop import Callback, Trainer


class ExpertLoad(Callback):
    """Load per layer and expert (1.0 is balanced), MaxVio, and the range of the balancing biases."""

    def on_step(self, trainer: Trainer, result: StepResult, metrics: dict[str, Any]) -> None:
        if result.load is None:
            return
        metrics |= load_metrics(result.load.numpy())
        if result.bias_range is not None:
            metrics["moe/bias_min"], metrics["moe/bias_max"] = result.bias_range
        trainer.shared["max_vio"] = metrics["moe/max_vio"]


class DepthAndDecay(Callback):
    """Every `every` steps, from the first micro-batch: quantiles of the decays and the attention over depth.

    The probe sees tensors of this rank only; each layer's numbers come from the data-parallel rank 0 of its stage and
    are gathered over pipeline ranks by the engine's world.
    """

    def __init__(self, every: int, bound: float | None) -> None:
        self.every, self.bound = max(1, every), bound
        self.decay: dict[int, list[float]] = {}
        self.depth: dict[tuple[int, int], list[float]] = {}

    def _due(self, trainer: Trainer) -> bool:
        return (trainer.state.step + 1) % self.every == 0 or trainer.state.step == 0

    def before_step(self, trainer: Trainer) -> None:
        if self._due(trainer):
            self.decay, self.depth = {}, {}
            trainer.engine.set_probe(self._see)

    def _see(self, name: str, value: torch.Tensor) -> None:
        kind, _, rest = name.partition(".")
        if kind == "log_decay" and int(rest) not in self.decay:
            g = value.float()
            # the share of channels that decay as fast as they may, or without a bound as fast as K3's allows
            near = (g < 0.95 * (self.bound if self.bound is not None else -5.0)).float().mean()
            sample = g.flatten()[:: max(1, g.numel() // 65536)]
            quantiles = torch.quantile(sample, torch.tensor([0.05, 0.5, 0.95], device=g.device))
            self.decay[int(rest)] = [float(g.mean()), *quantiles.tolist(), float(near), float(g.exp().mean())]
            self.decay[int(rest)] += torch.histc(g.exp(), bins=20, min=0.0, max=1.0).div(g.numel()).tolist()
        elif kind == "depth":
            part, _, layer = rest.partition(".")
            place = (int(layer), 0 if part == "attention" else 1) if layer else (1 << 30, 0)
            if place not in self.depth:
                self.depth[place] = value.mean(-1).tolist()

    def on_step(self, trainer: Trainer, result: StepResult, metrics: dict[str, Any]) -> None:
        if not (trainer.state.step % self.every == 0 or trainer.state.step == 1):
            return
        trainer.engine.set_probe(None)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (self.decay, self.depth))
        decay, depth = {}, {}
        for rank_decay, rank_depth in reversed(everyone):
            decay |= rank_decay
            depth |= rank_depth
        if decay:
            rows = [decay[layer] for layer in sorted(decay)]
            columns = list(zip(*rows))
            metrics["kda/log_decay_mean"] = sum(columns[0]) / len(rows)
            metrics["kda/log_decay_p05"], metrics["kda/log_decay_p50"], metrics["kda/log_decay_p95"] = (
                sum(c) / len(rows) for c in columns[1:4]
            )
            metrics["kda/near_bound_share"] = sum(columns[4]) / len(rows)
            metrics["kda/decay_mean"] = sum(columns[5]) / len(rows)
            metrics["kda/decay_histogram"] = [[round(x, 5) for x in row[6:]] for row in rows]
        if depth:
            metrics["depth/attention"] = [[round(x, 4) for x in depth[place]] for place in sorted(depth)]


class UpdateNorm(Callback):
    """Every `every` steps: the L2 norm of what the step did to the weights, and relative to the weights."""

    def __init__(self, every: int) -> None:
        self.every = max(1, every)

    def before_step(self, trainer: Trainer) -> None:
        if (trainer.state.step + 1) % self.every == 0:
            trainer.engine.remember_weights()

    def on_step(self, trainer: Trainer, result: StepResult, metrics: dict[str, Any]) -> None:
        if trainer.state.step % self.every == 0:
            moved, whole = trainer.engine.weight_change()
            metrics["train/update_norm"], metrics["train/weight_norm"] = moved, whole


class Throughput(Callback):
    """TFLOP/s and MFU by the convention of k3train.planning.flops."""

    def __init__(self, flops_per_token: float, devices: int, peak_tflops: float | None) -> None:
        self.flops_per_token, self.devices, self.peak = flops_per_token, devices, peak_tflops

    def on_step(self, trainer: Trainer, result: StepResult, metrics: dict[str, Any]) -> None:
        rate = metrics["train/tokens_per_second"]
        tokens = rate * metrics["train/step_seconds"]
        trainer.state.flops += self.flops_per_token * tokens
        metrics["train/flops_total"] = trainer.state.flops
        metrics["train/tflops"] = self.flops_per_token * rate / self.devices / 1e12
        metrics["train/tokens_per_second_per_device"] = rate / self.devices
        if self.peak:
            metrics["train/mfu"] = metrics["train/tflops"] / self.peak
            trainer.shared["rates"] = {key: metrics[key] for key in ("train/mfu", "train/tflops")}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            metrics["train/memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
