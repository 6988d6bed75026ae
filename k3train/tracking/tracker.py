"""What the training loop holds: one object that writes the truth first and mirrors it after."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3train.tracking.jsonl import JsonlWriter
from k3train.tracking.wandb import WandbMirror, WandbSettings, settle_run_id

log = logging.getLogger(__name__)


class Tracker:
    """Logs a run on rank 0; other ranks do not build one.

    Args:
        run_dir: the run folder (made if absent).
        config: the resolved config as plain dicts and lists.
        run_name: the name of the run.
        wandb_mode: `auto` (online with a key, else offline), `offline`, `online` or `disabled`.
        resume_step: last step in the checkpoint that was loaded, None for a new start.
        resume_id: the W&B id in the checkpoint, None when there is none.
        settings: further W&B settings; their `mode` gives way to `wandb_mode`.

    Attributes:
        run_id: the run's W&B id; store it in the checkpoint.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        config: Mapping[str, Any],
        *,
        run_name: str,
        wandb_mode: str = "auto",
        resume_step: int | None = None,
        resume_id: str | None = None,
        settings: WandbSettings | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.writer = JsonlWriter(self.run_dir / "metrics.jsonl", resume_step)
        self.run_id = settle_run_id(self.run_dir, resume_id)
        wandb_settings = replace(settings or WandbSettings(), mode=wandb_mode)
        self.mirror = WandbMirror(self.run_dir, run_name, self.run_id, config, wandb_settings)
        self._closed = False
        if resume_step is not None:
            self.mirror.event("resume", f"resumed after step {resume_step}", resume_step)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a step: numbers, lists (one value a layer) or matrices as nested lists."""
        self.mirror.log_line(step, self.writer.write(step, metrics))

    def event(self, kind: str, message: str, step: int) -> None:
        """Record something that happened: `skip`, `preempt`, `save`, `config`, ... with a sentence."""
        self.writer.event(kind, message, step)
        self.mirror.event(kind, message, step)

    def rewind(self, step: int, message: str) -> None:
        """The run went back to `step` without a restart: later lines are set aside (the mirror cannot unlog them)."""
        self.writer.rewind(step, message)
        self.mirror.event("rollback", message, step)

    def close(self) -> dict[str, Any]:
        """Flush both; returns the mirror's account (`mode`, `logged`, `skipped`, `dropped`, `problem`, `folder`)."""
        if self._closed:
            return {}
        self._closed = True
        self.writer.close()
        if self.writer.lost:
            log.warning("%d lines of %s were lost to a disk that refused them", self.writer.lost, self.writer.path)
        account = self.mirror.close()
        if account.get("problem"):
            log.warning("W&B: %s", account["problem"])
        if account.get("error"):
            log.warning("W&B: %s", account["error"])
        if account.get("dropped"):
            log.warning("W&B: %d records were dropped; `k3train track replay` can send them", account["dropped"])
        return account
