"""A made-up run with the shapes and habits of a real one, for the drawings, the report and the mirror."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from k3train.tracking.expert_load import load_metrics
from k3train.tracking.jsonl import encode_line


def records(
    steps: int = 200, *, layers: int = 10, experts: int = 16, seed: int = 0, matrix_every: int = 1, floor: float = 3.6
) -> list[dict[str, Any]]:
    """Records of `steps` steps: loss, learning rate, load, decay, depth attention, throughput, validation, events."""
    rng = np.random.default_rng(seed)
    taste = rng.gamma(2.0, 0.5, (layers, experts))  # what the router prefers before balancing has worked
    out: list[dict[str, Any]] = []
    warm, tokens, clock = max(steps // 100, 2), 4096, 1_790_000_000.0
    depth = [min(2 + i // 4, 6) for i in range(2 * (layers + 1))]
    lean = [rng.normal(0.0, 1.5, n) for n in depth]
    decay = -np.sort(rng.uniform(0.02, 2.0, layers))
    for step in range(1, steps + 1):
        part = step / steps
        lr = 1e-3 * (step / warm if step <= warm else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * part)))
        mean = floor + (8.32 - floor) * math.exp(-6.0 * part) + 0.25 * (1 - part)
        loss = mean + 0.13 * float(rng.normal())
        clock += 0.42 + 0.03 * float(rng.random())
        rate = tokens / (0.42 + 0.03 * float(rng.random())) * (0.6 if step == 1 else 1.0)
        record = {
            "step": step, "time": round(clock, 3), "train/loss": loss, "train/lr": lr,
            "train/grad_norm": 0.5 + 3.0 * math.exp(-10 * part) + 0.1 * abs(float(rng.normal())),
            "train/tokens_per_second": rate, "train/step_seconds": tokens / rate,
            "train/consumed_tokens": step * tokens, "train/clipped": float(part < 0.1),
            "train/skipped_steps": int(part > 0.6),
            "train/tflops": rate * 6 * 1.3e6 / 1e12, "train/mfu": 0.31 + 0.01 * float(rng.normal()),
        }  # fmt: skip
        if step == 1 or step % matrix_every == 0:
            mix = math.exp(-8.0 * part)
            popularity = mix * taste + (1 - mix) * taste.mean(axis=1, keepdims=True)
            counts = rng.poisson(popularity / popularity.sum(axis=1, keepdims=True) * tokens * 2)
            weights = [np.exp(x * min(1.0, 3 * part)) for x in lean]
            record |= load_metrics(counts) | {
                "moe/bias_min": -0.2 * part, "moe/bias_max": 0.3 * part,
                "kda/log_decay_mean": float(decay.mean()), "kda/log_decay_p05": float(3 * decay.mean()),
                "kda/log_decay_p50": float(0.7 * decay.mean()), "kda/log_decay_p95": float(0.05 * decay.mean()),
                "kda/decay_mean": float(np.exp(decay).mean() * (0.9 + 0.1 * part)),
                "kda/near_bound_share": 0.02 + 0.05 * part + 0.002 * float(rng.random()),
                "kda/decay_histogram": _histogram(rng, decay * (1.2 - part)),
                "depth/attention": [(x / x.sum()).tolist() for x in weights],
            }  # fmt: skip
        if step % max(steps // 4, 1) == 0:
            held_out = mean + 0.11
            record |= {"valid/loss": held_out, "valid/bits_per_byte": held_out / math.log(2) / 3.1}
            record["valid/unigram_loss"] = 6.31
        out.append(record)
        if step == steps // 2:
            out.append({"step": step, "time": round(clock, 3), "event": "save", "message": f"saved step {step}"})
        if step == int(steps * 0.6):
            message = "loss not finite; step skipped (1 in a row)"
            out.append({"step": step, "time": round(clock, 3), "event": "skip", "message": message})
    return out


def _histogram(rng: np.random.Generator, decay: np.ndarray) -> list[list[float]]:
    """Shares [layers][20 bins of 0..1] of exp(log decay) around each layer's mean."""
    values = np.exp(decay[:, None] * rng.gamma(2.0, 0.5, (len(decay), 400)))
    return [(np.histogram(row, bins=20, range=(0, 1))[0] / row.size).tolist() for row in values]


def write_run(folder: Path, rows: list[dict[str, Any]], config: dict[str, Any] | None = None) -> Path:
    """Write records as the metrics file of a run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(encode_line(row) for row in rows))
    (folder / "config.yaml").write_text(json.dumps(config or {"run": {"name": folder.name}, "train": {"steps": 200}}))
    return folder
