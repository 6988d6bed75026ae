"""Open weights wherever they lie: a run folder, one of its checkpoints, or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3train.config.hf import SpecialTokens
from k3train.config.schema import Config, ModelConfig
from k3train.engine.universal import UniversalSource, is_universal
from k3train.errors import WeightsError
from k3train.weights.checkpoint import CheckpointSource
from k3train.weights.hf import tokens_of
from k3train.weights.reader import HFFolder
from k3train.weights.source import TensorSource


@dataclass
class Opened:
    """Weights with what is needed to use them.

    kind: "run" or "hf". origin: the checkpoint folder or the Hugging Face folder. run: the run folder, or None.
    config: the run's whole configuration, or None. tokenizer: a tokenizer.json, or None. identity: says which weights
    these are, in JSON values.
    """

    kind: str
    origin: Path
    model: ModelConfig
    source: TensorSource
    tokens: SpecialTokens
    tokenizer: Path | None
    identity: dict[str, Any]
    run: Path | None = None
    config: Config | None = None


def open_weights(path: Path | str, say: Callable[[str], None] = print) -> Opened:
    """Open `path`. Raises WeightsError or CheckpointError saying what it is not."""
    path = Path(path)
    if (path / "config.json").is_file():
        return open_hf(path)
    return open_run(path, say)


def checkpoint_source(folder: Path) -> CheckpointSource | UniversalSource:
    """The weights of one checkpoint, whichever engine wrote it."""
    return UniversalSource(folder) if is_universal(folder) else CheckpointSource(folder)


def open_hf(path: Path) -> Opened:
    """A Hugging Face folder of kimi_k3 or kimi_linear."""
    folder = HFFolder(path)
    tokenizer = path / "tokenizer.json"
    identity = {"folder": str(path.resolve()), "config": folder.config}
    found = tokenizer if tokenizer.is_file() else None
    return Opened("hf", path, folder.model, folder, folder.tokens, found, identity)


def _there(path: Path) -> str:
    """What could have been meant."""
    near = path.parent
    runs = sorted(p.parent.name for p in near.glob("*/config.yaml")) if near.is_dir() else []
    if runs:
        return f"{near} holds {', '.join(runs[:12])}"
    return f"train one first: k3train train run.name={path.name}"


def open_run(path: Path, say: Callable[[str], None] = print) -> Opened:
    """A run folder (its newest whole checkpoint) or one checkpoint of it; checksums are verified."""
    from k3train.config.compose import load_resolved
    from k3train.train import checkpoint as disk

    if not path.is_dir():
        raise WeightsError(
            f"{path} is neither a run folder, nor a checkpoint, nor a Hugging Face folder; {_there(path)}"
        )
    origin = disk.locate(path, say)
    run = next((folder for folder in (path, *origin.parents) if (folder / "config.yaml").is_file()), None)
    if run is None:
        raise WeightsError(f"{origin} lies in no run folder: no config.yaml beside its checkpoints")
    config = load_resolved(run / "config.yaml")
    tokenizer = run / "tokenizer.json"
    found = tokenizer if tokenizer.is_file() else None
    tokens = tokens_of(tokenizer) if found else SpecialTokens()
    identity = {"checkpoint": str(origin.resolve()), "manifest": (origin / disk.MANIFEST).read_text()}
    return Opened(
        "run", origin, config.model, checkpoint_source(origin), tokens, found, identity, run=run, config=config
    )
