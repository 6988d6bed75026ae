"""Parallel sizes, the process groups they make, and the two borders of a tensor-parallel region."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)

from k3train.config.schema import ParallelConfig
from k3train.errors import LayoutError


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layout, in ranks; `virtual` counts model chunks a rank. `data` counts data-parallel replicas."""

    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False

    @property
    def data(self) -> int:
        return self.world // (self.tensor * self.pipeline * self.context)

    def describe(self) -> str:
        parts = [("TP", self.tensor), ("PP", self.pipeline), ("VPP", self.virtual), ("CP", self.context)]
        parts += [("EP", self.expert), ("DP", self.data)]
        words = [f"{n}{v}" + ("+SP" if n == "TP" and self.sequence_parallel else "") for n, v in parts if v > 1]
        return " ".join(words) or "one process"


def sizes_from_config(parallel: ParallelConfig, world: int) -> Sizes:
    """Sizes of a composed configuration on `world` ranks.

    Raises LayoutError when the world does not divide by tensor * pipeline * context.
    """
    model_ranks = parallel.tensor * parallel.pipeline * parallel.context
    if world % model_ranks:
        raise LayoutError(
            f"{world} ranks do not divide by parallel.tensor * parallel.pipeline * parallel.context = {model_ranks}; "
            f"start a multiple of {model_ranks} ranks or change one of the three"
        )
    sequence = parallel.tensor > 1 if parallel.sequence is None else parallel.sequence and parallel.tensor > 1
    p = parallel
    return Sizes(world, p.tensor, p.pipeline, p.virtual, p.context, p.expert, sequence)


@dataclass
class Layout:
    """The process groups of this rank. Built once after `torch.distributed` is initialised."""

    sizes: Sizes
    groups: ProcessGroupCollection
    tp: dist.ProcessGroup = field(init=False)
    pp: dist.ProcessGroup = field(init=False)
    cp: dist.ProcessGroup = field(init=False)
    ep: dist.ProcessGroup = field(init=False)
    dp: dist.ProcessGroup = field(init=False)
    dp_cp: dist.ProcessGroup = field(init=False)
    token_group: dist.ProcessGroup = field(init=False)  # every rank that holds tokens of this pipeline stage
    expert_dp: dist.ProcessGroup = field(init=False)

    def __post_init__(self) -> None:
        g: Any = self.groups
        self.tp, self.pp, self.cp, self.ep, self.dp, self.dp_cp = g.tp, g.pp, g.cp, g.ep, g.dp, g.dp_cp
        self.expert_dp = g.expt_dp
        self.token_group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)

    @property
    def is_last_stage_rank(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    def enter_tensor_parallel(self, x: torch.Tensor) -> torch.Tensor:
        """[T_local, ...] -> [T, ...]: what a column-parallel product reads.

        With sequence parallelism an all-gather over tokens (backward reduce-scatter), else the identity whose
        backward is an all-reduce. One call serves every projection of the same input.
        """
        if self.sizes.tensor == 1:
            return x
        if self.sizes.sequence_parallel:
            return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=self.tp)
        return copy_to_tensor_model_parallel_region(x, group=self.tp)

    def scatter_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] replicated over tensor ranks -> this rank's tokens under sequence parallelism."""
        if self.sizes.tensor == 1 or not self.sizes.sequence_parallel:
            return x
        return scatter_to_sequence_parallel_region(x, group=self.tp)


_made: list[dist.ProcessGroup] = []  # the groups of the layout in force
_in_force: list[tuple[Sizes, int]] = []  # that layout and its timeout, if there is one


def _release() -> None:
    """Close the groups of the layout before: megatron only forgets them, and every gloo group keeps polling threads."""
    parallel_state.destroy_model_parallel()
    while _made:
        group = _made.pop()
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
    gc.collect()  # models of the layout before hold groups in reference cycles


def initialize(sizes: Sizes, *, timeout_minutes: int = 30) -> Layout:
    """Make megatron's process groups for `sizes`, or find them made; `torch.distributed` must be initialised."""
    alive = dist.distributed_c10d._world.pg_map
    if _in_force == [(sizes, timeout_minutes)] and _made and all(group in alive for group in _made):
        return Layout(sizes, ProcessGroupCollection.use_mpu_process_groups())
    _release()
    before = set(alive)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=timeout_minutes,
    )
    _made.extend(g for g in dist.distributed_c10d._world.pg_map if g not in before)
    _in_force[:] = [(sizes, timeout_minutes)]
    return Layout(sizes, ProcessGroupCollection.use_mpu_process_groups())
