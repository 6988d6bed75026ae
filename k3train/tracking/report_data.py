"""Boil a run's `metrics.jsonl` down to what a page can hold: bucketed series, a few heatmap frames, the events.

100,000 steps come down to some hundred kilobytes: a series keeps the mean, the least and the greatest value of each of
at most `BUCKETS` buckets (so that no spike is lost), a heatmap keeps evenly spaced frames of one byte a cell.
"""

from __future__ import annotations

import base64
import math
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3train.errors import DataError
from k3train.tracking.heatmap import matrix_to_array
from k3train.tracking.jsonl import iter_jsonl

BUCKETS = 900  # points of a series; about one a pixel
LAYER_POINTS = 150  # points of each line in a per-layer series
MAX_EVENTS = 400
# Heatmaps, and the value their darkest colour stands for; None: the greatest of the run.
MATRICES: dict[str, float | None] = {"moe/load": 2.0, "depth/attention": 1.0, "kda/decay_histogram": None}


@dataclass
class Budget:
    """How much of the page one run may take."""

    buckets: int = BUCKETS
    heat_bytes: int = 900_000  # raw bytes of each heatmap, before base64 adds a third
    frames: int = 120


class FrameKeeper:
    """Keeps at most `2 * limit` evenly thinned (step, matrix) frames of a stream of unknown length, and the last."""

    def __init__(self, limit: int) -> None:
        self.limit = max(limit, 2)
        self.stride = 1
        self.seen = 0
        self.frames: list[tuple[int, np.ndarray]] = []
        self.last: tuple[int, np.ndarray] | None = None

    def add(self, step: int, matrix: Sequence[Sequence[float]]) -> None:
        """Offer a frame."""
        self.last = (step, matrix_to_array(matrix))
        if self.seen % self.stride == 0:
            self.frames.append(self.last)
            if len(self.frames) > 2 * self.limit:
                self.frames = self.frames[::2]
                self.stride *= 2
        self.seen += 1

    def chosen(self, count: int) -> list[tuple[int, np.ndarray]]:
        """At most `count` frames, first and last included, evenly spaced between."""
        frames = list(self.frames)
        if self.last is not None and frames[-1][0] != self.last[0]:
            frames.append(self.last)
        if len(frames) <= count:
            return frames
        at = np.unique(np.linspace(0, len(frames) - 1, max(count, 2)).round().astype(int))
        return [frames[i] for i in at]


def significant(values: np.ndarray, digits: int = 5) -> list[float | None]:
    """Numbers rounded to `digits` significant digits for JSON; non-finite ones become null."""
    out: list[float | None] = []
    for value in values.tolist():
        if not math.isfinite(value):
            out.append(None)
        elif value == int(value) and abs(value) < 1e15:
            out.append(int(value))
        else:
            out.append(float(f"{value:.{digits}g}"))
    return out


def bucketed(steps: np.ndarray, values: np.ndarray, buckets: int) -> dict[str, list[float | None]]:
    """Mean, least and greatest of equally filled buckets: `{"s": last step, "y": mean, "lo", "hi"}`.

    With no more points than buckets the values are kept as they are and `lo`, `hi` are left out.
    """
    if len(values) <= buckets:
        return {"s": [int(s) for s in steps], "y": significant(values)}
    edges = np.linspace(0, len(values), buckets + 1).round().astype(int)
    starts = edges[:-1]
    good = np.isfinite(values)
    filled, count = np.where(good, values, 0.0), np.add.reduceat(good.astype(float), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(filled, starts) / count
    low = np.minimum.reduceat(np.where(good, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(good, values, -np.inf), starts)
    return {
        "s": [int(s) for s in steps[edges[1:] - 1]], "y": significant(mean), "lo": significant(low),
        "hi": significant(high),
    }  # fmt: skip


def _heat(frames: list[tuple[int, np.ndarray]], top: float | None) -> dict[str, Any]:
    """Frames as one base64 string of bytes [frame, row, column]; 0-254 is 0..top (clipped), 255 an absent cell."""
    if top is None:
        top = max(float(np.nanmax(matrix)) for _, matrix in frames) or 1.0
    rows = max(matrix.shape[0] for _, matrix in frames)
    columns = max(matrix.shape[1] for _, matrix in frames)
    cube = np.full((len(frames), rows, columns), 255, dtype=np.uint8)
    for index, (_, matrix) in enumerate(frames):
        level = np.clip(np.nan_to_num(matrix, nan=0.0) / top, 0.0, 1.0) * 254
        level = np.where(np.isnan(matrix), 255, level.round())
        cube[index, : matrix.shape[0], : matrix.shape[1]] = level.astype(np.uint8)
    data = base64.b64encode(cube.tobytes()).decode()
    return {"rows": rows, "columns": columns, "top": top, "steps": [step for step, _ in frames], "data": data}


class _Collector:
    """One pass over the records: scalars, per-layer lists, matrices, events."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.scalars: dict[str, tuple[array, array]] = {}
        self.layers: dict[str, tuple[array, list[list[float]]]] = {}
        self.matrices: dict[str, FrameKeeper] = {}
        self.events: list[dict[str, Any]] = []
        self.time: tuple[array, array] = (array("q"), array("d"))

    def arrays(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a scalar, both float64."""
        steps, values = self.scalars[key]
        return np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)

    def add(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        if "event" in record:
            event = {"step": step, "kind": str(record["event"]), "message": str(record.get("message", ""))}
            self.events.append({**event, "time": record.get("time")})
            return
        if isinstance(record.get("time"), (int, float)):
            self.time[0].append(step)
            self.time[1].append(record["time"])
        for key, value in record.items():
            if key in ("step", "time"):
                continue
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                steps, values = self.scalars.setdefault(key, (array("q"), array("d")))
                steps.append(step)
                values.append(value)
            elif isinstance(value, list) and value:
                if isinstance(value[0], list):
                    if key in MATRICES:
                        self.matrices.setdefault(key, FrameKeeper(self.budget.frames)).add(step, value)
                elif all(isinstance(item, (int, float)) for item in value):
                    steps, rows = self.layers.setdefault(key, (array("q"), []))
                    steps.append(step)
                    rows.append(value)


def _axes(collector: _Collector) -> dict[str, list[float | None]]:
    """Tables from step to tokens, FLOPs and hours, for the page to interpolate in."""
    steps = np.asarray(collector.time[0], dtype=np.int64)
    if not len(steps):
        return {}
    pick = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 400)).round().astype(int))
    at = steps[pick].astype(np.float64)
    clock = np.asarray(collector.time[1])
    out = {"s": significant(at), "hours": significant((clock[pick] - clock[0]) / 3600, 6)}
    if "train/consumed_tokens" in collector.scalars:
        out["tokens"] = significant(np.interp(at, *collector.arrays("train/consumed_tokens")), 8)
    total = _flops(collector)
    if total is not None:
        out["flops"] = significant(np.interp(at, *total), 6)
    return out


def _flops(collector: _Collector) -> tuple[np.ndarray, np.ndarray] | None:
    """Cumulative FLOPs: `train/flops_total` where logged, else the sum over steps of TFLOP/s x seconds."""
    if "train/flops_total" in collector.scalars:
        return collector.arrays("train/flops_total")
    if not {"train/tflops", "train/step_seconds"} <= collector.scalars.keys():
        return None
    steps, seconds = collector.arrays("train/step_seconds")
    rate = np.interp(steps, *collector.arrays("train/tflops"))
    return steps, np.cumsum(np.nan_to_num(rate * seconds)) * 1e12


def run_data(run_dir: str | os.PathLike[str], budget: Budget | None = None) -> dict[str, Any]:
    """Everything the page shows of one run, as plain JSON values.

    Args:
        run_dir: a run folder with `metrics.jsonl`, or the file itself.
        budget: limits on what is kept.

    Raises:
        DataError: there is no metrics file, or it holds no metrics.
    """
    budget = budget or Budget()
    path = Path(run_dir)
    file = path if path.is_file() else path / "metrics.jsonl"
    if not file.exists():
        raise DataError(f"{path} holds no metrics.jsonl; give run folders, such as runs/k3_tiny")
    collector = _Collector(budget)
    for record in iter_jsonl(file):
        collector.add(record)
    if not collector.scalars:
        raise DataError(f"{file} holds no metrics yet; train a step first")
    heat = {}
    for key, keeper in collector.matrices.items():
        cells = max(keeper.frames[0][1].size, 1)
        count = max(2, min(budget.frames, budget.heat_bytes // cells))
        heat[key] = _heat(keeper.chosen(count), MATRICES[key])
    series = {}
    for key, (steps, values) in collector.scalars.items():
        series[key] = bucketed(np.asarray(steps), np.asarray(values), budget.buckets)
    layers = {}
    for key, (steps, rows) in collector.layers.items():
        pick = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), LAYER_POINTS)).round().astype(int))
        if len({len(rows[i]) for i in pick}) == 1:
            table = np.asarray([rows[i] for i in pick], dtype=np.float64)
            layers[key] = {"s": [int(steps[i]) for i in pick], "y": [significant(line, 4) for line in table.T]}
    shown = collector.events[-MAX_EVENTS:]
    return {
        "name": file.resolve().parent.name, "axes": _axes(collector), "series": series, "layers": layers, "heat": heat,
        "events": shown, "events_left_out": len(collector.events) - len(shown),
        "last_time": collector.time[1][-1] if len(collector.time[1]) else None,
    }  # fmt: skip
