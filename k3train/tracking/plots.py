"""`loss.png` and `expert_load.png`, drawn from a run's `metrics.jsonl`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from k3train.errors import DataError
from k3train.tracking.heatmap import DIVERGING
from k3train.tracking.jsonl import iter_jsonl
from k3train.tracking.report_data import FrameKeeper

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1d2733", "#6b7684", "#e6e9ed"
BLUE, ORANGE, GREEN, RED = "#1f6fb2", "#d9622b", "#2f8f5b", "#a5262a"


def smooth(values: Sequence[float] | np.ndarray, window: float) -> np.ndarray:
    """Centred Gaussian mean over about `window` points (sigma = window / 2), so that a falling curve does not lag.

    Near the ends the kernel is cut and renormalised; gaps (nan) carry no weight.
    """
    array = np.asarray(values, dtype=np.float64)
    good = np.isfinite(array)
    sigma = max(window / 2, 1e-9)
    reach = min(int(np.ceil(3 * sigma)), max(len(array) - 1, 0))
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    total = np.convolve(np.where(good, array, 0.0), kernel)[reach : reach + len(array)]
    weight = np.convolve(good.astype(np.float64), kernel)[reach : reach + len(array)]
    return np.where(weight > 1e-12, total / np.maximum(weight, 1e-12), np.nan)


def series(records: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that hold a number under `key`."""
    pairs = [(r["step"], r[key]) for r in records if isinstance(r.get(key), (int, float))]
    return np.asarray([p[0] for p in pairs]), np.asarray([p[1] for p in pairs], dtype=np.float64)


def _load(
    run_dir: str | os.PathLike[str], needed: str, others: tuple[str, ...]
) -> tuple[Path, list[dict[str, Any]], FrameKeeper]:
    """The folder, the records reduced to the keys asked for, and thinned frames of `needed` if that is a matrix.

    A long run's matrices would fill the memory: of those at most some hundred are kept.
    """
    folder = Path(run_dir)
    file = folder / "metrics.jsonl"
    wanted = {"step", needed, *others}
    records, frames = [], FrameKeeper(64)
    for record in iter_jsonl(file) if file.exists() else ():
        kept = {key: value for key, value in record.items() if key in wanted}
        if isinstance(kept.get(needed), list):
            frames.add(record["step"], kept.pop(needed))
        if len(kept) > 1:
            records.append(kept)
    if not frames.frames and not any(needed in record for record in records):
        raise DataError(f"{file} holds no {needed}; point at the folder of a run that has trained")
    return folder, records, frames


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)  # the Agg canvas by hand: neither pyplot nor a display is touched
    return figure


def _dress(axes: Axes, *, grid: bool = True) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c3c9d1")
    axes.tick_params(colors=MUTED, labelsize=9, length=3, color="#c3c9d1")
    if grid:
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)


def _titles(figure: Figure, title: str, subtitle: str) -> None:
    height = figure.get_figheight()
    figure.text(0.075, 1 - 0.30 / height, title, fontsize=14, fontweight="bold", color=INK, va="center")
    figure.text(0.075, 1 - 0.58 / height, subtitle, fontsize=9.5, color=MUTED, va="center")


def _save(figure: Figure, path: Path) -> Path:
    beside = path.with_name(path.stem + ".tmp" + path.suffix)
    figure.savefig(beside)
    beside.replace(path)
    return path


def _spread_labels(positions: Sequence[float], gap: float, lowest: float) -> list[float]:
    """Move label heights apart to at least `gap`, in order, near where they belong and not beneath `lowest`."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    placed = [positions[i] for i in order]
    for _ in range(50):
        for k in range(len(placed) - 1):
            if (lack := gap - (placed[k + 1] - placed[k])) > 0:
                placed[k] -= lack / 2
                placed[k + 1] += lack / 2
        if placed and placed[0] < lowest:
            placed[0] = lowest
    out = [0.0] * len(positions)
    for k, i in enumerate(order):
        out[i] = placed[k]
    return out


def plot_loss(run_dir: str | os.PathLike[str], *, unigram: float | None = None) -> Path:
    """Draw `loss.png`: raw and smoothed training loss, validation points, the unigram model's loss, the learning rate.

    Args:
        run_dir: a run folder with `metrics.jsonl`.
        unigram: validation loss of a unigram model in nats; by default the run's own `valid/unigram_loss`, if logged.

    Returns:
        The path of the picture. Raises DataError when the run holds no loss.
    """
    others = ("valid/loss", "valid/bits_per_byte", "valid/unigram_loss", "train/consumed_tokens", "train/lr")
    folder, records, _ = _load(run_dir, "train/loss", others)
    steps, loss = series(records, "train/loss")
    valid_steps, valid = series(records, "valid/loss")
    _, bits = series(records, "valid/bits_per_byte")
    _, tokens = series(records, "train/consumed_tokens")
    rate_steps, rate = series(records, "train/lr")
    if unigram is None:
        _, logged = series(records, "valid/unigram_loss")
        unigram = float(logged[-1]) if len(logged) else None

    figure = _figure(9.0, 5.6)
    top = figure.add_axes((0.075, 0.265, 0.765, 0.60))
    strip = figure.add_axes((0.075, 0.105, 0.765, 0.105), sharex=top)
    soft = smooth(loss, max(len(loss) / 25, 2.0))
    finite = loss[np.isfinite(loss)]
    top.plot(steps, loss, color=BLUE, alpha=0.28, linewidth=0.9)
    top.plot(steps, soft, color=BLUE, linewidth=2.2, solid_capstyle="round")
    labels = [(float(soft[-1]), f"training {soft[-1]:.2f}", BLUE)] if np.isfinite(soft[-1]) else []
    if len(valid):
        top.plot(valid_steps, valid, color=ORANGE, linewidth=1.2, alpha=0.7)
        style = {"markersize": 6.5, "markeredgecolor": "white", "clip_on": False, "zorder": 5}
        top.plot(valid_steps, valid, "o", color=ORANGE, **style)  # type: ignore[arg-type]
        labels.append((float(valid[-1]), f"validation {valid[-1]:.2f}", ORANGE))
    if unigram is not None:
        top.axhline(unigram, color=MUTED, linewidth=1.1, linestyle=(0, (5, 4)))
        labels.append((unigram, f"unigram {unigram:.2f}", MUTED))
    everything = np.concatenate([finite, valid[np.isfinite(valid)], [unigram] if unigram is not None else []])
    low, high = float(everything.min()), float(np.quantile(finite, 0.995) if len(finite) else everything.max())
    high = max([high, *([unigram] if unigram is not None else []), *finite[:1].tolist()])
    margin = 0.06 * max(high - low, 1e-3)
    top.set_ylim(low - margin, high + margin)
    top.set_xlim(0, max(int(steps[-1]), 2))
    gap = 0.052 * (high - low + 2 * margin)
    for (_, text, colour), y in zip(labels, _spread_labels([item[0] for item in labels], gap, low)):
        top.annotate(
            text, (1.0, y), xycoords=("axes fraction", "data"), xytext=(8, 0), textcoords="offset points",
            color=colour, fontsize=9.5, va="center", fontweight="bold" if colour != MUTED else "normal",
        )  # fmt: skip
    _dress(top)
    top.tick_params(labelbottom=False)
    top.set_ylabel("loss, nats per token", color=MUTED, fontsize=9.5)

    if len(rate):
        strip.fill_between(rate_steps, rate, color=GREEN, alpha=0.16, linewidth=0)
        strip.plot(rate_steps, rate, color=GREEN, linewidth=1.4)
        strip.set_ylim(0, float(rate.max()) * 1.18 or 1.0)
        strip.set_yticks([0, float(rate.max())], ["0", f"{rate.max():.0e}".replace("e-0", "e-")])
        strip.annotate(
            "learning rate", (1.0, 0.5), xycoords="axes fraction", xytext=(8, 0), textcoords="offset points",
            color=GREEN, fontsize=9.5, va="center",
        )  # fmt: skip
    _dress(strip, grid=False)
    strip.set_xlabel("step", color=MUTED, fontsize=9.5)

    words = [f"training loss {finite[0]:.2f} → {soft[-1]:.2f}"] if len(finite) else []
    if len(valid):
        words.append(f"validation {valid[-1]:.2f}" + (f" ({bits[-1]:.2f} bits per byte)" if len(bits) else ""))
    words.append(f"{int(steps[-1]):,} steps" + (f", {int(tokens[-1]):,} tokens" if len(tokens) else ""))
    _titles(figure, folder.resolve().name, "  ·  ".join(words))
    return _save(figure, folder / "loss.png")


def plot_expert_load(run_dir: str | os.PathLike[str]) -> Path:
    """Draw `expert_load.png`: load of every expert of every layer, and MaxVio over the steps beneath.

    Load 1.0 is a fair share. On the left the least balanced step, on the right the mean of the last tenth of the logged
    ones (of an even choice of them in a long run).
    Returns the path of the picture; raises DataError when the run has no expert load.
    """
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    folder, records, keeper = _load(run_dir, "moe/load", ("moe/max_vio", "moe/max_vio_per_layer"))
    frames = keeper.chosen(len(keeper.frames) + 1)
    tail = frames[-max(len(frames) // 10, 1) :]
    late = f"step {tail[0][0]:,}"
    if len(tail) > 1:
        late = f"mean of steps {tail[0][0]:,} to {tail[-1][0]:,}"
    worst_step, worst_load = max(frames, key=lambda frame: float(np.abs(frame[1] - 1.0).sum()))
    pictures = [
        (f"step {worst_step:,}, the least balanced", worst_load),
        (late, np.mean([matrix for _, matrix in tail], axis=0)),
    ]
    layers, experts = pictures[0][1].shape
    colours = LinearSegmentedColormap.from_list("load", [tuple(c / 255 for c in stop) for stop in DIVERGING])
    block = float(np.clip(0.24 * layers, 1.5, 5.0))
    height = block + 3.55
    figure = _figure(9.0, height)
    y0, h = 2.42 / height, block / height
    image: Any = None
    for index, (title, matrix) in enumerate(pictures):
        axes = figure.add_axes((0.075 + index * 0.405, y0, 0.385, h))
        image = axes.imshow(matrix, cmap=colours, norm=Normalize(0, 2), aspect="auto", interpolation="nearest")
        axes.set_title(title, fontsize=9.5, color=MUTED, loc="left", pad=5)
        axes.tick_params(colors=MUTED, labelsize=8.5, length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        if experts <= 64 and layers <= 64:  # white seams between cells while they are large enough to be seen as cells
            axes.set_xticks(np.arange(experts + 1) - 0.5, minor=True)
            axes.set_yticks(np.arange(layers + 1) - 0.5, minor=True)
            axes.grid(which="minor", color="white", linewidth=1.0 if experts <= 32 else 0.5)
            axes.tick_params(which="minor", length=0)
        step = max(1, -(-layers // 12))
        axes.set_yticks(range(0, layers, step), [str(i) for i in range(0, layers, step)] if index == 0 else [])
        axes.set_xticks(range(0, experts, max(1, -(-experts // 8))))
        axes.set_xlabel("expert", color=MUTED, fontsize=9.5)
        if index == 0:
            axes.set_ylabel("MoE layer", color=MUTED, fontsize=9.5)
    bar_axes = figure.add_axes((0.88, y0, 0.013, h))
    bar = figure.colorbar(image, cax=bar_axes, ticks=[0, 0.5, 1, 1.5, 2])
    bar.ax.set_yticklabels(["idle", "½", "fair share", "1½", "≥ double"])
    bar.ax.tick_params(colors=MUTED, labelsize=8.5, length=0)
    bar.outline.set_visible(False)  # type: ignore[operator]

    below = figure.add_axes((0.075, 0.50 / height, 0.79, 1.25 / height))
    steps, worst = series(records, "moe/max_vio")
    ends: list[tuple[float, str, float]] = []
    per_layer = [(r["step"], r["moe/max_vio_per_layer"]) for r in records if r.get("moe/max_vio_per_layer")]
    if per_layer:
        spread = np.asarray([values for _, values in per_layer], dtype=np.float64)
        at = [step for step, _ in per_layer]
        below.fill_between(at, spread.min(axis=1), spread.max(axis=1), color=RED, alpha=0.13, linewidth=0)
        below.plot(at, spread.mean(axis=1), color=RED, linewidth=1.0, alpha=0.55)
        ends.append((float(spread[-1].mean()), f"mean {spread[-1].mean():.2f}", 0.65))
    if len(worst):
        below.plot(steps, worst, color=RED, linewidth=1.8)
        below.set_ylim(0, max(float(np.quantile(worst, 0.99)) * 1.15, 0.05))
        below.set_xlim(0, max(int(steps[-1]), 2))
        ends.append((float(worst[-1]), f"worst layer {worst[-1]:.2f}", 1.0))
    gap = 0.13 * (below.get_ylim()[1] - below.get_ylim()[0])
    for (_, text, alpha), y in zip(ends, _spread_labels([end[0] for end in ends], gap, gap / 2)):
        _label(below, y, text, RED, alpha)
    _dress(below)
    below.set_ylabel("MaxVio", color=MUTED, fontsize=9.5)
    below.set_xlabel("step", color=MUTED, fontsize=9.5)

    words = f"{layers} MoE layers of {experts} experts"
    if len(worst):
        words += f"  ·  MaxVio at most {np.nanmax(worst):.2f}, now {worst[-1]:.2f}"
        words += " (surplus of the busiest expert; 0 is balance)"
    _titles(figure, f"{folder.resolve().name}: expert load", words)
    return _save(figure, folder / "expert_load.png")


def _label(axes: Axes, y: float, text: str, colour: str, alpha: float) -> None:
    axes.annotate(
        text, (1.0, y), xycoords=("axes fraction", "data"), xytext=(8, 0), textcoords="offset points",
        color=colour, fontsize=9, va="center", alpha=alpha, annotation_clip=False,
    )  # fmt: skip
