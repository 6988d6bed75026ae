"""`k3train plan`: what a configuration is and costs, before anything runs."""

from __future__ import annotations

from k3train.config import checks
from k3train.config.schema import Config, expand_pattern
from k3train.planning import flops, layout, memory, parameters, time


def plan(config: Config) -> int:
    """Print parameters by part, FLOPs, memory and time of the configuration's layout."""
    print("\n\n".join(sections(config)))
    return 0


def sections(config: Config) -> list[str]:
    """The parts of the plan as text blocks."""
    world = _world(config)
    if config.parallel.auto:
        config, why = layout.resolve_auto(config, world)
        return [
            model_section(config),
            flops.formula(config.model, config.train.seq_length),
            why,
            cost_section(config, world),
        ]
    return [model_section(config), flops.formula(config.model, config.train.seq_length), cost_section(config, world)]


def _world(config: Config) -> int:
    p, c = config.parallel, config.cluster
    if p.world is None and c.name != "local":
        asked = c.nodes * (c.ranks_per_node or c.gpus_per_node or 1)
        return asked if p.auto else checks.ranks(config, asked)
    if p.auto:
        return p.world or layout.local_gpus()
    return checks.ranks(config)


def model_section(config: Config) -> str:
    """Parameters by part."""
    m = config.model
    parts = parameters.count(m)
    pattern = expand_pattern(m.pattern, m.hybrid)
    lines = [
        f"{m.name}: {len(pattern)} layers ({pattern.count('K')} {m.mixer}, {pattern.count('F')} full attention), "
        f"hidden {m.hidden_size}, {m.moe.experts} experts, top {m.moe.top_k}"
    ]
    lines += [f"  {name:<20} {value:>22,}  {_billions(value)}" for name, value in parts.by_part().items()]
    lines.append(f"  {'total':<20} {parts.total:>22,}  {_billions(parts.total)}")
    lines.append(f"  {'active a token':<20} {parts.active:>22,}  {_billions(parts.active)}  (input embedding left out)")
    return "\n".join(lines)


def _billions(value: int) -> str:
    return f"{value / 1e9:>10,.2f} B" if value >= 1e8 else f"{value / 1e6:>10,.2f} M"


def cost_section(config: Config, world: int) -> str:
    """Memory of the fullest rank, and seconds a step on GPUs."""
    p, t = config.parallel, config.train
    used = memory.estimate(config, world)
    tokens = t.global_batch * t.seq_length
    lines = [
        f"{world} rank{'s' if world > 1 else ''}: tensor {p.tensor}, pipeline {p.pipeline} x {p.virtual}, "
        f"context {p.context}, expert {p.expert}, data {world // (p.tensor * p.pipeline * p.context)}; "
        f"{tokens:,} tokens a step, {t.steps:,} steps",
        "memory of the fullest rank, estimated: "
        + ", ".join(f"{name} {value / 1e9:,.2f} GB" for name, value in used.by_part().items())
        + f" = {used.total / 1e9:,.2f} GB",
    ]
    limit = config.cluster.gpu_memory_gb
    if used.total / 1e9 > layout.FILL * limit:
        lines.append(f"  this does not fit a GPU of {limit:.0f} GB; `parallel=auto parallel.world=N` proposes a layout")
    seconds = time.estimate(config, world)
    less = layout.less_recomputed(config, world)
    if less is not None:
        kept = less.config.train.recompute_layers
        typed = "train.recompute=none" if kept is None else f"train.recompute_layers={kept}"
        lines.append(
            f"  `{typed}` fits too, {less.gigabytes:,.2f} GB, and computes less again: {less.seconds:.3g} s a step"
        )
    shown = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in seconds.by_part().items() if value)
    lines.append(f"seconds a step on H100 or H200 GPUs, estimated: {shown} = {seconds.total:.3g}")
    days = seconds.total * t.steps / 86400
    lines.append(
        f"  {t.steps:,} steps: {days:.3g} days, {days * 24 * world:,.3g} GPU hours, {tokens * t.steps:.3g} tokens"
    )
    lines.append(f"  {time.assumptions()}")
    return "\n".join(lines)
