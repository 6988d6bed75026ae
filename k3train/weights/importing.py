"""From a Hugging Face folder to a run folder with a checkpoint of step 0, under the layout of the configuration."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from k3train.config.schema import Config
from k3train.errors import WeightsError
from k3train.weights.commands import imported_config, run_folder
from k3train.weights.reader import HFFolder


def import_run(config: Config, source: Path) -> int:
    """Every rank reads its own part of the weights, then all save one checkpoint. Returns the exit code.

    The checkpoint holds no optimizer state, and its manifest says so: training starts with fresh moments.
    """
    from k3train import launch, platform

    config = imported_config(config, source)
    folder = run_folder(config)
    checkpoints = folder / "checkpoints"
    platform.install()
    place = launch.init_distributed(config)
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from k3train.config.compose import save_resolved, to_dict
    from k3train.engine.megatron import training_dtype
    from k3train.engine.sharded_state import DirectSaveStrategy, model_state
    from k3train.model.build import build_chunks, chunks_of_rank, make_context
    from k3train.parallel import layout as layouts
    from k3train.train import checkpoint as disk
    from k3train.train.state import RunState
    from k3train.weights.load import load_weights

    if disk.list_checkpoints(checkpoints):
        raise WeightsError(f"{folder} already has checkpoints; type run.name=OTHER to import into a new run")
    weights = HFFolder(source)
    layout = layouts.initialize(layouts.sizes_from_config(config.parallel, place.world))
    device = torch.device(f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu")
    model = dataclasses.replace(config.model, backend="local")  # nothing is computed: any machine can import
    ctx = make_context(model, layout, training_dtype(config.train.precision, device), device)
    chunks = chunks_of_rank(config.model, layout.sizes, layout.pp.rank(), config.parallel.pipeline_layout)
    models = build_chunks(ctx, chunks, seed=config.run.seed)
    load_weights(models, weights, layout)
    writing, final = disk.writing_folder(checkpoints, 0), disk.step_folder(checkpoints, 0)
    if place.rank == 0:
        writing.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    content = {"model": model_state(list(models), layout), "state": RunState().to_dict()}
    dist_checkpointing.save(content, str(writing), DirectSaveStrategy())
    dist.barrier()
    if place.rank == 0:
        about = {"step": 0, "model": config.model.name, "run": config.run.name, "optimizer": False}
        disk.finish(writing, final, about)
        save_resolved(config, folder / "config.yaml")
        if (source / "tokenizer.json").is_file():
            shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
        write_model_group(folder, to_dict(config)["model"])
        skipped = f", {len(weights.skipped)} vision tensors left out" if weights.skipped else ""
        kept = "MXFP4 experts decoded exactly" if weights.packed else "not quantised"
        print(f"imported {source} ({weights.format}, {kept}{skipped}) into {final}")
        print(f"train it: k3train train run.name={config.run.name}")
    dist.barrier()
    return 0


def write_model_group(folder: Path, model: dict[str, object]) -> None:
    """Write the imported model as a Hydra group option: `--config-dir FOLDER/conf model=RUN` names it elsewhere."""
    from omegaconf import OmegaConf

    group = folder / "conf" / "model"
    group.mkdir(parents=True, exist_ok=True)
    (group / f"{folder.name}.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(model)), encoding="utf-8")
