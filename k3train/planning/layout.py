"""Which layout to run: every one that the checks accept and that fits, ranked by estimated step time."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from k3train.config import checks
from k3train.config.activations import WHOLE_LAYERS
from k3train.config.schema import Config, expand_pattern
from k3train.errors import ConfigError, LayoutError
from k3train.planning import memory, time

FILL = 0.85  # share of a GPU's memory that an estimate may take; the rest is for kernels and fragmentation

NEAR = 0.05  # estimates closer than this are not told apart


@dataclass(frozen=True)
class Candidate:
    """A layout with what it costs."""

    config: Config
    seconds: float
    gigabytes: float

    def sizes(self) -> str:
        p = self.config.parallel
        names = ("tensor", "pipeline", "virtual", "context", "expert", "data")
        shown = " ".join(f"{n}={getattr(p, n)}" for n in names if getattr(p, n) not in (1, None))
        return f"{shown or 'one rank'} micro_batch={self.config.train.micro_batch}"


def resolve_auto(config: Config, world: int | None = None) -> tuple[Config, str]:
    """The configuration with the sizes of parallel.auto filled in, and why in words.

    world: ranks a launcher gave; else parallel.world, else the GPUs of this machine (1 on CPU). Raises LayoutError
    where nothing fits.
    """
    ranks = world or config.parallel.world or local_gpus()
    limit = config.cluster.gpu_memory_gb
    found = candidates(config, ranks, limit)
    if not found:
        raise LayoutError(_nothing_fits(config, ranks, limit))
    best = found[0]
    checks.check(best.config, ranks)
    others = "; ".join(f"{c.sizes()} {c.seconds:.3g} s {c.gigabytes:.0f} GB" for c in found[1:3])
    why = (
        f"parallel.auto on {ranks} ranks: {best.sizes()}, of {len(found)} layouts that fit the simplest of the fastest "
        f"by estimate ({best.seconds:.3g} s a step, {best.gigabytes:.1f} of {limit:.0f} GB)"
        + (f"; next: {others}" if others else "")
        + f" ({time.assumptions()})"
    )
    return best.config, why


def candidates(config: Config, world: int, limit: float | None) -> list[Candidate]:
    """Layouts that the checks accept and that fit `limit` GB (None: any), fastest first.

    Estimates within NEAR of the fastest count as equal: of these the layout that splits the fewest things is first.
    """
    found = []
    for sizes, micro_batch in itertools.product(_sizes(config, world), _micro_batches(config)):
        trial = copy.deepcopy(config)
        trial.parallel.auto = False
        trial.train.micro_batch = micro_batch
        for name, value in sizes.items():
            setattr(trial.parallel, name, value)
        try:
            checks.check(trial, world)
        except ConfigError:
            continue
        used = memory.estimate(trial, world).total / 1e9
        if limit is None or used <= FILL * limit:
            found.append(Candidate(trial, time.estimate(trial, world).total, used))
    if not found:
        return []
    equal = (1 + NEAR) * min(c.seconds for c in found)
    return sorted(
        found, key=lambda c: (0.0, _complexity(c.config), c.seconds) if c.seconds <= equal else (c.seconds, 0, 0.0)
    )


def less_recomputed(config: Config, world: int) -> Candidate | None:
    """The same layout with the fewest layers computed again that fits; None where none are, nothing less fits, or the
    step would take as long, because the first of its pipeline stages still computes all of theirs again."""
    t = config.train
    size = WHOLE_LAYERS.get(t.recompute)
    if size is None:
        return None
    now = time.estimate(config, world).total
    asked = t.recompute_layers or len(expand_pattern(config.model.pattern, config.model.hybrid))
    for below in range(0, asked, size):
        trial = copy.deepcopy(config)
        if below:
            trial.train.recompute_layers = below
        else:
            trial.train.recompute, trial.train.recompute_layers = "none", None
            trial.train.activations.layer_inputs = "auto"
        used = memory.estimate(trial, world).total / 1e9
        if used <= FILL * config.cluster.gpu_memory_gb:
            seconds = time.estimate(trial, world).total
            return Candidate(trial, seconds, used) if seconds < 0.99 * now else None
    return None


def _sizes(config: Config, world: int) -> Iterator[dict[str, int]]:
    layers = len(expand_pattern(config.model.pattern, config.model.hybrid))
    powers = [1 << i for i in range(world.bit_length()) if (1 << i) <= world]
    tensors = [x for x in powers if x <= 8]
    pipelines = [x for x in range(1, min(world, layers) + 1) if world % x == 0]
    contexts = [x for x in powers if config.train.seq_length // x >= 4096 or x == 1]
    experts = [x for x in powers if config.model.moe.experts % x == 0]
    for tensor, pipeline, context, expert in itertools.product(tensors, pipelines, contexts, experts):
        if world % (tensor * pipeline * context):
            continue
        for virtual in (1, 2, 4) if pipeline > 1 else (1,):
            if pipeline * virtual <= layers:
                data = world // (tensor * pipeline * context)
                yield {
                    "tensor": tensor, "pipeline": pipeline, "virtual": virtual, "context": context, "expert": expert,
                    "data": data, "world": world,
                }  # fmt: skip


def _micro_batches(config: Config) -> list[int]:
    """The micro batch asked for, and what it can be cut into so that more ranks share the batch."""
    asked = config.train.micro_batch
    return [size for size in range(asked, 0, -1) if asked % size == 0]


def _complexity(config: Config) -> int:
    p = config.parallel
    return sum(size > 1 for size in (p.tensor, p.pipeline, p.virtual, p.context, p.expert))


def local_gpus() -> int:
    """GPUs of this machine, at least 1; asked of the driver's files, because importing torch takes seconds."""
    folder = Path("/proc/driver/nvidia/gpus")
    return max(1, len(list(folder.iterdir())) if folder.is_dir() else 0)


def _nothing_fits(config: Config, world: int, limit: float) -> str:
    anything = candidates(config, world, None)
    if not anything:
        return (
            f"no layout of {world} ranks divides this model and batch; type another parallel.world or "
            f"train.global_batch (now {config.train.global_batch}, micro batch {config.train.micro_batch})"
        )
    least = min(anything, key=lambda c: c.gigabytes)
    less = "train.recompute=full" if config.train.recompute_layers is None else "train.recompute_layers=null"
    return (
        f"no layout of {world} ranks fits in {FILL:.0%} of {limit:.0f} GB; the smallest, {least.sizes()}, needs "
        f"{least.gigabytes:.0f} GB a rank; type a larger parallel.world, or {less}, or a smaller train.micro_batch"
    )
