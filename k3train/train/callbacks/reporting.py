"""Metrics to the tracker, progress to the person, plots and the closing table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from k3train.engine.base import StepResult
from k3train.tracking.plots import plot_expert_load, plot_loss
from k3train.tracking.progress import Progress
from k3train.tracking.tracker import Tracker
from k3train.train.loop import Callback, Trainer


class Reporting(Callback):
    """Rank 0 writes every `log_every`-th step (and those with held-out numbers) and shows all of them."""

    def __init__(self, tracker: Tracker | None, progress: Progress | None, log_every: int) -> None:
        self.tracker, self.progress, self.log_every = tracker, progress, max(1, log_every)

    def on_step(self, trainer: Trainer, result: StepResult, metrics: dict[str, Any]) -> None:
        step = trainer.state.step
        metrics |= trainer.shared.pop("save", {})  # how long the last checkpoint took
        if self.tracker is not None:
            if result.skipped:
                self.tracker.event("skip", f"loss {result.loss}: no update", step)
            if step % self.log_every == 0 or "valid/loss" in metrics or trainer.finished:
                self.tracker.log(step, {k: v for k, v in metrics.items() if not _is_nan(v)})
        if self.progress is not None:
            self.progress.update(step, metrics)

    def close(self, trainer: Trainer) -> None:
        if self.progress is not None:
            self.progress.close()
        if self.tracker is not None:
            trainer.shared["wandb"] = self.tracker.close()


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def draw(run_dir: Path, unigram_loss: float | None) -> list[Path]:
    """loss.png and, for a model with experts, expert_load.png; nothing before the first step."""
    text = (run_dir / "metrics.jsonl").read_text()
    if '"train/loss"' not in text:
        return []
    drawn = [plot_loss(run_dir, unigram=unigram_loss)]
    if '"moe/load"' in text:
        drawn.append(plot_expert_load(run_dir))
    return drawn


def closing_rows(trainer: Trainer, tokens_per_second: float, unigram_loss: float | None) -> list[tuple[str, str]]:
    """Rows of the final table."""
    state, validation = trainer.state, trainer.shared.get("validation", {})
    rows = [("steps", f"{state.step} ({state.consumed_tokens:,} tokens)")]
    if state.first_loss is not None and state.last_loss is not None:
        rows.append(("loss, first and last step", f"{state.first_loss:.4f} -> {state.last_loss:.4f}"))
    if validation:
        rows.append(("validation loss", f"{validation['valid/loss']:.4f} nats a token"))
        if "valid/bits_per_byte" in validation:
            rows.append(("validation bits per byte", f"{validation['valid/bits_per_byte']:.4f}"))
        if "valid/recall_accuracy" in validation:
            rows.append(("held-out recall accuracy", f"{100 * validation['valid/recall_accuracy']:.1f} %"))
    if unigram_loss is not None:
        rows.append(("unigram model's validation loss", f"{unigram_loss:.4f}"))
    if tokens_per_second > 0:
        rows.append(("tokens/s", f"{tokens_per_second:,.0f}"))
    if "max_vio" in trainer.shared:
        rows.append(("MaxVio, last step", f"{trainer.shared['max_vio']:.3f}"))
    if state.skipped_steps:
        rows.append(("skipped steps", str(state.skipped_steps)))
    return rows
