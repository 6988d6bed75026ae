"""`k3train convert`: a run of one engine becomes a run that the other goes on with: weights, both moments, steps, state.

One process holds the model and its optimizer state, on the CPU: 14 bytes a parameter, 12 of them fp32. It needs
megatron-core alone; the files of DeepSpeed's universal checkpoints are read and written without deepspeed.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from k3train.config.schema import Config
from k3train.engine import universal
from k3train.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from k3train.engine.megatron import MegatronEngine

ENGINES = ("megatron", "deepspeed")


def convert(words: list[str]) -> int:
    """`k3train convert SOURCE --to ENGINE --output RUN`."""
    from k3train.commands import _Parser, run_folder

    parser = _Parser(
        prog="k3train convert", description="Make a run of one engine's checkpoint that the other engine goes on with."
    )
    parser.add_argument("source", metavar="SOURCE", help="a run folder, its name inside runs/, or one checkpoint")
    parser.add_argument("--to", choices=ENGINES, required=True)
    parser.add_argument(
        "--output", required=True, metavar="RUN", help="the new run: a folder, or its name inside runs/"
    )
    args: argparse.Namespace = parser.parse_args(words)
    source = run_folder(args.source)
    output = Path(args.output).expanduser() if "/" in args.output else Path("runs") / args.output
    final = convert_run(source, output, args.to)
    print(f"converted {source} into {final}\ntrain on: k3train train run.name={output.name} run.dir={output.parent} "
          f"engine={args.to} and what was typed for {source.name}")  # fmt: skip
    return 0


def convert_run(source: Path, output: Path, engine: str) -> Path:
    """Convert the newest good checkpoint of `source` for `engine` into the new run `output`; returns the checkpoint.

    Raises CheckpointError or ConfigError where there is none, it is that engine's already, or `output` has checkpoints.
    """
    from k3train import platform

    platform.install()  # before megatron is imported: a machine without a GPU needs its adapter
    from k3train.config import checks
    from k3train.config.compose import load_resolved, save_resolved
    from k3train.inference.loading import start_process
    from k3train.train import checkpoint as disk

    folder = disk.locate(source, print)
    run = next((f for f in (source, *folder.parents) if (f / "config.yaml").is_file()), None)
    if run is None:
        raise CheckpointError(f"{folder} lies in no run folder: no config.yaml beside its checkpoints")
    found = "deepspeed" if universal.is_universal(folder) else "megatron"
    if found == engine:
        raise ConfigError(f"{folder} is the {engine} engine's already; type --to {ENGINES[ENGINES.index(engine) - 1]}")
    checkpoints = output / "checkpoints"
    if disk.list_checkpoints(checkpoints):
        raise ConfigError(f"{output} has checkpoints already; type --output OTHER")
    config = load_resolved(run / "config.yaml")
    target = for_engine(config, engine)
    target.run.name, target.run.dir = output.name, str(output.parent)
    checks.check(target, 1)
    optimizer, step = disk.has_optimizer(folder), json.loads((folder / disk.MANIFEST).read_text())["step"]
    start_process()
    writing, final = disk.writing_folder(checkpoints, step), disk.step_folder(checkpoints, step)
    writing.mkdir(parents=True)
    about = {"step": step, "model": target.model.name, "run": target.run.name, "optimizer": optimizer}
    if engine == "deepspeed":
        held = one_process(config, _dtype_of(folder), for_reading=True)
        state = held.load(folder, optimizer=optimizer)
        write_universal(held, state, writing, optimizer=optimizer)
    else:
        content = universal.read_about(folder)
        optimizer = about["optimizer"] = optimizer and content["optimizer"]
        held = one_process(target, content["dtype"], for_reading=False)
        fill(held, folder, optimizer=optimizer)
        _save_megatron(held, content["state"], writing, optimizer=optimizer)
    disk.finish(writing, final, about)
    save_resolved(target, output / "config.yaml")
    if (run / "tokenizer.json").is_file():
        shutil.copyfile(run / "tokenizer.json", output / "tokenizer.json")
    return final


def for_engine(config: Config, engine: str) -> Config:
    """The same run under another engine: data parallelism only, each with its own way of sharing state."""
    target = copy.deepcopy(config)
    target.engine.name, target.engine.offload = engine, "none"
    p = target.parallel
    p.tensor = p.pipeline = p.virtual = p.context = p.expert = 1
    p.sequence = p.world = p.data = p.pipeline_layout = None
    p.overlap_grad_reduce = p.overlap_param_gather = p.auto = False
    p.distributed_optimizer = engine == "megatron"
    return target


def one_process(config: Config, precision: str, *, for_reading: bool) -> MegatronEngine:
    """A megatron engine that holds everything on the CPU. for_reading: state as the checkpoint's run kept it."""
    from k3train.engine.megatron import MegatronEngine
    from k3train.parallel import layout as layouts
    from k3train.platform import install_adam

    install_adam()
    built = for_engine(config, "megatron")
    if for_reading:
        built.parallel.distributed_optimizer = config.parallel.distributed_optimizer
    built.train.precision, built.model.backend = precision, "local"
    return MegatronEngine(built, layouts.initialize(layouts.Sizes()), torch.device("cpu"))


def _dtype_of(folder: Path) -> str:
    """Of the weights in a checkpoint of the megatron engine, as train.precision is typed."""
    from k3train.weights.checkpoint import CheckpointSource

    return "bf16" if CheckpointSource(folder).read("final_norm.weight").dtype == torch.bfloat16 else "fp32"


def live_states(engine: MegatronEngine) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """(parameter, {"fp32": weights, and each state of its optimizer}) of a whole model; the tensors are the live ones,
    in the parameter's shape or flat."""
    from k3train.engine import plain_state

    plain: dict[str, dict[str, torch.Tensor]] = {}
    if not engine.shards_state:
        for key, tensor, _ in plain_state.tensors(engine.optimizer, list(engine.models)):
            _, kind, name = key.split(".", 2)
            plain.setdefault(name, {})["fp32" if kind == "master" else kind] = tensor
    for name, p in engine.models[0].named_parameters():
        if not engine.shards_state:
            yield name, {"fp32": p.detach(), **plain[name]}
            continue
        part = next(o for o in plain_state.parts(engine.optimizer) if p in o.model_param_group_index_map)
        tensors = part._get_main_param_and_optimizer_states(p)
        yield name, {"fp32" if key == "param" else key: t.detach() for key, t in tensors.items()}


def write_universal(engine: MegatronEngine, state: dict[str, Any], folder: Path, *, optimizer: bool) -> None:
    """The engine's weights, buffers and, if wanted, optimizer state as a universal checkpoint."""
    from k3train.engine import plain_state
    from k3train.engine.deepspeed_saving import write_files

    steps = [int(g.get("step", 0)) for o in plain_state.parts(engine.optimizer) for g in o.optimizer.param_groups]
    for name, live in live_states(engine):
        shape = engine.models[0].get_parameter(name).shape
        keys = live if optimizer else ["fp32"]
        by_key = {key: live[key].float().reshape(shape).clone() for key in keys}
        write_files(folder, list(universal.files({name: by_key}, max(steps) if optimizer else None)))
    buffers = {n: b.float().clone() for n, b in engine.models[0].named_buffers() if getattr(b, "k3", None) is not None}
    write_files(folder, [(universal.file_of(n, universal.WEIGHTS), {"param": b}) for n, b in buffers.items()])
    if optimizer:
        write_files(folder, list(universal.for_deepspeed(max(steps), buffers)))
    dtype = "bf16" if engine.ctx.dtype == torch.bfloat16 else "fp32"
    write_files(folder, [(universal.ABOUT, universal.about(state, optimizer=optimizer, dtype=dtype))])


@torch.no_grad()
def fill(engine: MegatronEngine, folder: Path, *, optimizer: bool) -> None:
    """Put a universal checkpoint into the engine. Raises CheckpointError where one does not fit the other."""
    from k3train.engine import plain_state

    parameters = dict(engine.models[0].named_parameters())
    for name, tensor in [*parameters.items(), *engine.models[0].named_buffers()]:
        if getattr(tensor, "k3", None) is None:
            continue
        value = universal.read(folder, name)
        if value.shape != tensor.shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(value.shape)}, the model of the run's config.yaml has "
                f"{list(tensor.shape)}"
            )
        tensor.copy_(value)
    engine.optimizer.reload_model_params()
    if not optimizer:
        return
    plain_state.allocate(engine.optimizer)
    step = 0.0
    for name, live in live_states(engine):
        for key, tensor in live.items():
            tensor.copy_(universal.read(folder, name, key).reshape(tensor.shape))
        step = max(step, float(universal.read(folder, name, "step")))
    for one in plain_state.parts(engine.optimizer):
        for group in one.optimizer.param_groups:
            group["step"] = int(step)


def _save_megatron(engine: MegatronEngine, state: dict[str, Any], folder: Path, *, optimizer: bool) -> None:
    if optimizer:
        engine.save(folder, state)
        return
    from megatron.core import dist_checkpointing

    from k3train.engine.sharded_state import DirectSaveStrategy, model_state

    content = {"model": model_state(list(engine.models), engine.layout), "state": state}
    dist_checkpointing.save(content, str(folder), DirectSaveStrategy())
