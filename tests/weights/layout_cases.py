"""What the ranks of a layout do with weights: save a checkpoint, load a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from k3train.config.compose import save_resolved
from k3train.engine.megatron import gather_full
from k3train.engine.sharded_state import DirectSaveStrategy, model_state
from k3train.train import checkpoint as disk
from k3train.weights.load import load_weights
from k3train.weights.opening import open_weights
from tests.parallel.tiny import make_engine

EXPORTABLE = {"model.mla.latent_eps": 1e-6}  # the one epsilon that Hugging Face clients know


def save_run(sizes: dict[str, Any], run: str) -> None:
    """The tiny model, the same under every layout, as the first checkpoint of a run folder."""
    engine = make_engine(sizes, EXPORTABLE)
    root = Path(run) / "checkpoints"
    writing, final = disk.writing_folder(root, 1), disk.step_folder(root, 1)
    if dist.get_rank() == 0:
        writing.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    content = {"model": model_state(list(engine.models), engine.layout), "state": {"step": 1}}
    dist_checkpointing.save(content, str(writing), DirectSaveStrategy())
    dist.barrier()
    if dist.get_rank() == 0:
        disk.finish(writing, final, {"step": 1})
        save_resolved(engine.config, Path(run) / "config.yaml")
    dist.barrier()


def load_folder(sizes: dict[str, Any], folder: str) -> dict[str, torch.Tensor] | None:
    """Load a folder into another initialisation of the model; rank 0 returns every parameter and buffer whole."""
    engine = make_engine(sizes, EXPORTABLE, seed=99)
    load_weights(engine.models, open_weights(folder).source, engine.layout)
    local = {
        name: (tensor.detach().clone(), tensor.k3)
        for model in engine.models
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if hasattr(tensor, "k3")
    }
    whole = gather_full(local, engine.layout)
    return whole if dist.get_rank() == 0 else None
