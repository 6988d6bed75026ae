"""`k3train export`, `k3train import` and `k3train quantize`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from k3train.config.schema import Config
from k3train.errors import ConfigError, WeightsError
from k3train.weights.folder import WriteResult

if TYPE_CHECKING:
    from k3train.weights.opening import Opened


def run_folder(config: Config) -> Path:
    """The folder of the run that the configuration names."""
    return Path(config.run.dir) / config.run.name


def export(config: Config) -> int:
    """Write a run's newest checkpoint (or `export.source`) as a Hugging Face folder; in parallel under a launcher."""
    from k3train.weights.hf import export_folder
    from k3train.weights.opening import open_weights

    rank, world = place()
    say = print if rank == 0 else _silent
    source = Path(config.export.source) if config.export.source else run_folder(config)
    opened = open_weights(source, say)
    output = Path(config.export.output) if config.export.output else (opened.run or run_folder(config)) / "hf"
    say(f"export: {opened.origin} -> {output}")
    left_out = tensors_left_out(opened, config.export.format)
    if left_out:
        say(f"  {len(left_out)} tensors of multi-token prediction stay behind: the format has no place for them")
    result = export_folder(
        opened.model, opened.source, output, identity=opened.identity, format=config.export.format,
        tokenizer=opened.tokenizer, tokens=opened.tokens, shard_bytes=config.export.shard_bytes, rank=rank,
        world=world, progress=_progress(say),
    )  # fmt: skip
    say(describe(result))
    return 0


def tensors_left_out(opened: Opened, format: str) -> list[str]:
    """Weights of a checkpoint that the format does not hold: those of multi-token prediction, as in the release.

    Raises WeightsError for any other: the checkpoint and its configuration would not belong together.
    """
    from k3train.config.hf import format_of
    from k3train.engine.universal import UniversalSource
    from k3train.weights.checkpoint import CheckpointSource
    from k3train.weights.names import entries

    if not isinstance(opened.source, (CheckpointSource, UniversalSource)):
        return []
    known = {entry.ours for entry in entries(opened.model, format_of(opened.model, format))}
    extra = [name for name in opened.source.names() if name not in known]
    foreign = [name for name in extra if not name.startswith("mtp")]
    if foreign:
        raise WeightsError(
            f"{opened.origin} holds {foreign[0]} ({len(foreign)} such tensors), which the model of its configuration "
            "does not have"
        )
    return extra


def import_(config: Config) -> int:
    """Start a run from a Hugging Face folder: a checkpoint of step 0 that any layout can load."""
    if not config.imports.source:
        raise ConfigError("import needs a folder: k3train import source=FOLDER run.name=NAME")
    from k3train.weights.importing import import_run

    return import_run(config, Path(config.imports.source))


def quantize(config: Config) -> int:
    """Quantise the routed experts of an exported folder to MXFP4."""
    from k3train.weights.quantizing import run_quantize

    return run_quantize(config)


def place() -> tuple[int, int]:
    """(rank, number of processes) that a launcher gave, else (0, 1)."""
    from k3train.launch import find_place

    found = find_place()
    return (found.rank, found.world) if found is not None else (0, 1)


def imported_config(config: Config, source: Path) -> Config:
    """The configuration of a run that starts from `source`: the folder's model, everything else as asked."""
    from k3train.config import checks
    from k3train.config import hf as hf_config
    from k3train.weights.reader import read_json

    result = copy.deepcopy(config)
    model = hf_config.from_hf(read_json(source / "config.json"), name=config.run.name)
    model.balancing, model.backend = config.model.balancing, config.model.backend
    model.moe.balancing = config.model.moe.balancing
    result.model = model
    checks.check(result, place()[1])
    return result


def describe(result: WriteResult) -> str:
    """One line about a folder that was written."""
    reused = f", {result.reused} kept from an earlier attempt" if result.reused else ""
    return (
        f"{result.folder}: {result.tensors:,} tensors, {result.nbytes / 1e9:,.3f} GB "
        f"in {result.shards} shards{reused}; names, shapes and checksums verified"
    )


def _progress(say: Callable[[str], None]) -> Callable[[int, int, str], None]:
    def tell(done: int, total: int, what: str) -> None:
        end = "\n" if done == total else "\r"
        if sys.stdout.isatty():
            print(f"  {done}/{total} shards ({what})", end=end, flush=True)
        elif done == total or done % max(1, total // 10) == 0:
            say(f"  {done}/{total} shards")

    return tell


def _silent(text: str) -> None:
    del text
