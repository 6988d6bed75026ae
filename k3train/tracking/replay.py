"""Push a run's `metrics.jsonl` to W&B: after a run without network, with dropped records, or with W&B off.

Two ways. `continue`: the run's own id, only the steps that the mirror has not sent yet (W&B steps cannot go back, so
holes before them stay). `fresh`: a new W&B run that holds the whole history exactly as the JSONL tells it, also after
a rollback, whose abandoned steps the first mirror may still show.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3train.errors import DataError, EnvironmentError_
from k3train.tracking.jsonl import iter_jsonl
from k3train.tracking.wandb import WandbSettings, new_run_id, resolve_mode, settle_run_id


@dataclass(frozen=True)
class Replayed:
    """What a replay did: W&B id, `online` or `offline`, steps sent, steps that W&B had already, the run's folder."""

    run_id: str
    mode: str
    logged: int
    skipped: int
    folder: str


def load_config(run_dir: Path) -> dict[str, Any]:
    """The run's resolved `config.yaml` as plain values; empty when there is none."""
    path = run_dir / "config.yaml"
    if not path.exists():
        return {}
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    return {str(key): value for key, value in config.items()} if isinstance(config, dict) else {}


def replay(
    run_dir: str | os.PathLike[str],
    *,
    fresh: bool = False,
    settings: WandbSettings | None = None,
    progress: Callable[[int], None] | None = None,
) -> Replayed:
    """Send the history of a run folder to W&B (offline without a key; `wandb sync` sends it later).

    Args:
        run_dir: a run folder with `metrics.jsonl`.
        fresh: make a new W&B run with the whole history instead of continuing the run's own.
        settings: project, entity, mode and the like; `media_every` is obeyed.
        progress: called with each step that was read.

    Raises:
        DataError: there is no metrics file, or W&B is disabled.
        EnvironmentError_: W&B would not open the run online.
    """
    from k3train.tracking.wandb_worker import Mirror, Refused

    folder = Path(run_dir)
    source = folder / "metrics.jsonl"
    if not source.exists():
        raise DataError(f"{source} does not exist; give a run folder, such as runs/k3_tiny")
    settings = settings or WandbSettings()
    mode = resolve_mode(settings.mode)
    if mode == "disabled":
        raise DataError("W&B is disabled (tracking.wandb or WANDB_MODE); a replay needs online or offline")
    run_id = new_run_id() if fresh else settle_run_id(folder, None)
    home = folder / "replay" / run_id if fresh else folder
    (home / "wandb").mkdir(parents=True, exist_ok=True)
    hello = {
        "run_dir": str(home.resolve()), "run_name": folder.resolve().name + (" (replay)" if fresh else ""),
        "run_id": run_id, "config": load_config(folder), "parent": os.getpid(), **asdict(settings), "mode": mode,
    }  # fmt: skip
    try:
        mirror = Mirror(json.loads(json.dumps(hello, default=str)))
    except Refused as error:
        raise EnvironmentError_(f"W&B refused the run ({error}); check the key, or use --mode offline") from error
    for record in iter_jsonl(source):
        step = record.pop("step")
        time = record.pop("time", None)
        if "event" in record:
            mirror.event(record["event"], record.get("message", ""))
        else:
            mirror.log(step, record if time is None else {**record, "_timestamp": time})
        if progress is not None:
            progress(step)
    mirror.finish()
    return Replayed(run_id, mirror.mode, mirror.logged, mirror.skipped, str(Path(mirror.run.dir).parent))
