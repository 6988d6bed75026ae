"""Pictures of docs/results.md, made of the records beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from k3train.ladder.arms import ABLATIONS, MIXERS, TASKS, suites
from k3train.ladder.pool import records
from k3train.ladder.tables import SHOWN, Record, final_loss, of_arm, of_departure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"linear": "#8a939e", "delta": "#2f8f5b", "gated_delta": "#c9962b", "kda": "#d9622b", "hybrid": "#a5262a",
           "softmax": "#1f6fb2"}  # fmt: skip


def figure(columns: int, height: float = 3.4) -> tuple[Figure, Sequence[Any]]:
    """A row of panels on an Agg canvas."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(3.3 * columns, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(drawn)
    panels = drawn.subplots(1, columns, squeeze=False)[0]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e9ed", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8)
    return drawn, panels


def band(axes: Axes, at: Sequence[float], rows: Sequence[Sequence[float]], colour: str, label: str) -> None:
    """The mean of rows [seeds, points] as a line and their range as a band."""
    values = np.asarray(rows, dtype=np.float64)
    axes.plot(at, values.mean(0), color=colour, label=label, marker="o" if len(at) < 10 else None, markersize=3.5)
    if len(values) > 1:
        axes.fill_between(at, values.min(0), values.max(0), color=colour, alpha=0.13, linewidth=0)


def save(drawn: Figure, file: Path) -> Path:
    drawn.savefig(file, dpi=110, metadata={"Software": None})
    return file


def recall_picture(found: Sequence[Record], file: Path) -> Path:
    """Accuracy against the count of each task, a panel a task."""
    drawn, panels = figure(len(TASKS))
    for axes, (task, (axis, _, counts)) in zip(panels, TASKS.items()):
        for name in MIXERS:
            arms = of_arm(found, name, task)
            if arms:
                rows = [[r["accuracy"][suite] for suite in suites(task)] for r in arms]
                band(axes, counts, rows, COLOURS[name], SHOWN[name])
        axes.set(title=task.replace("_", " "), xlabel=axis, ylim=(-0.02, 1.02))
    panels[0].set_ylabel("accuracy on held-out episodes")
    drawn.legend(*_entries(panels), loc="outside right upper", frameon=False, fontsize=8)
    return save(drawn, file)


def _entries(panels: Sequence[Axes]) -> tuple[list[Any], list[str]]:
    """Handles and labels of all panels, each label once."""
    found = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    return list(found.values()), list(found)


def text_picture(found: Sequence[Record], baseline: Sequence[Record], file: Path) -> Path:
    """Validation loss over steps, and after the last one."""
    drawn, (curves, ends) = figure(2)
    for i, name in enumerate(MIXERS):
        arms = list(baseline) if name == "hybrid" else of_arm(found, name)
        if not arms:
            continue
        steps = [row[0] for row in arms[0]["valid"]]
        band(curves, steps, [[row[1] for row in r["valid"]] for r in arms], COLOURS[name], SHOWN[name])
        ends.plot([i] * len(arms), [final_loss(r) for r in arms], "o", color=COLOURS[name], markersize=5, alpha=0.8)
    curves.set(xlabel="step", ylabel="validation loss, nats a token")
    curves.legend(frameon=False, fontsize=8)
    ends.set_title("after the last step, a dot a seed", fontsize=9)
    ends.set_xticks(range(len(MIXERS)), [SHOWN[name].replace(" ", "\n") for name in MIXERS], fontsize=8)
    return save(drawn, file)


def balancing_picture(found: Sequence[Record], file: Path) -> Path:
    """MaxVio of the worst layer over steps."""
    drawn, (axes,) = figure(1, 3.0)
    drawn.set_size_inches(6.6, 3.2)
    palette = ("#1f6fb2", "#2f8f5b", "#c9962b", "#a5262a")
    for name, colour in zip(ABLATIONS["balancing"], palette):
        arms = of_departure(found, "balancing", name)
        if arms:
            steps = [step for step, _ in arms[0]["max_vio"]]
            band(axes, steps, [[v for _, v in r["max_vio"]] for r in arms], colour, name)
    axes.set(xlabel="step", ylabel="MaxVio of the worst layer", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    return save(drawn, file)


def ablations_picture(found: Sequence[Record], file: Path) -> Path:
    """Validation loss after the last step of every arm, a panel an ablation, a dot a seed."""
    drawn, panels = figure(len(ABLATIONS), 3.2)
    for axes, (kind, arms) in zip(panels, ABLATIONS.items()):
        for i, name in enumerate(arms):
            losses = [final_loss(r) for r in of_departure(found, kind, name)]
            colour = "#1f6fb2" if not arms[name] else "#d9622b"
            axes.plot([i] * len(losses), losses, "o", color=colour, markersize=5, alpha=0.8)
        low, high = axes.get_ylim()
        if high - low < 0.15:  # a difference smaller than seeds make should not fill a panel
            axes.set_ylim((low + high) / 2 - 0.075, (low + high) / 2 + 0.075)
        labels = [name.replace(" (baseline)", "").replace(" ", "\n") for name in arms]
        axes.set_xticks(range(len(arms)), labels, fontsize=7.5)
        axes.set_xlim(-0.5, len(arms) - 0.5)
        axes.set_title(kind, fontsize=9)
    panels[0].set_ylabel("validation loss, nats a token")
    return save(drawn, file)


def draw(folder: Path) -> list[Path]:
    """Every picture that the records in `folder` allow, beside them."""
    recall, text, ablation = (records(folder / f"{name}.jsonl") for name in ("recall", "text", "ablation"))
    drawn = []
    if recall:
        drawn.append(recall_picture(recall, folder / "recall.png"))
    if text:
        drawn.append(text_picture(text, of_arm(ablation, "baseline"), folder / "text.png"))
    if ablation:
        drawn.append(balancing_picture(ablation, folder / "balancing.png"))
        drawn.append(ablations_picture(ablation, folder / "ablations.png"))
    return drawn
