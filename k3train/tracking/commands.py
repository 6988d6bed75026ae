"""The verbs of `k3train track` and `k3train report` without argument parsing: functions that print and return."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from k3train.tracking.replay import Replayed, replay
from k3train.tracking.report import write_report
from k3train.tracking.wandb import WandbSettings
from k3train.tracking.workspace import publish_workspace


def run_report(
    runs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str] | None = None,
    title: str | None = None,
    *,
    say: Callable[[str], None] = print,
) -> Path:
    """`k3train report RUN... [--output FILE] [--title TEXT]`: write the HTML page of one or several runs."""
    path = write_report(runs, output, title)
    say(f"wrote {path} ({path.stat().st_size / 1e6:.2f} MB); open it in a browser")
    return path


def run_replay(
    run: str | os.PathLike[str],
    *,
    mode: str = "auto",
    project: str = "k3train",
    entity: str | None = None,
    fresh: bool = False,
    say: Callable[[str], None] = print,
) -> Replayed:
    """`k3train track replay RUN [--fresh] [--mode MODE]`: push a run's JSONL to W&B."""
    done = replay(run, fresh=fresh, settings=WandbSettings(mode=mode, project=project, entity=entity))
    had = f", {done.skipped} were there already" if done.skipped else ""
    say(f"W&B run {done.run_id}: {done.logged} steps sent{had} ({done.mode})")
    if done.mode == "offline":
        say(f"upload it from a machine with a network and a key: wandb sync {done.folder}")
    return done


def run_workspace(
    *,
    project: str = "k3train",
    entity: str | None = None,
    output: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = print,
) -> Path | None:
    """`k3train track workspace [--project P] [--entity E] [--output FILE]`: build the W&B workspace."""
    return publish_workspace(project, entity, output, say=say)
