"""Parameters as megatron ShardedTensors, from their specs: any layout writes and reads the same global tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import nn
from torch.distributed import checkpoint as dcp

from k3train.model.parameters import ParameterSpec
from k3train.parallel.layout import Layout


def sharded_tensor(name: str, tensor: torch.Tensor, spec: ParameterSpec, layout: Layout) -> ShardedTensor:
    """One local shard with its place in the global tensor and its replica number."""
    offsets: list[tuple[int, int, int]] = []
    if spec.expert:
        offsets.append((0, layout.ep.rank(), layout.sizes.expert))
        replica = (0, 0, layout.expert_dp.rank())
    else:
        tensor_replica = layout.tp.rank()
        if spec.tensor_axis is not None:
            offsets.append((spec.tensor_axis, layout.tp.rank(), layout.sizes.tensor))
            tensor_replica = 0
        replica = (0, tensor_replica, layout.dp_cp.rank())
    return ShardedTensor.from_rank_offsets(name, tensor, *offsets, replica_id=replica)


def model_state(models: list[nn.Module], layout: Layout) -> dict[str, ShardedTensor]:
    """Every annotated parameter and buffer of this rank's chunks, by global name prefixed `model.`."""
    state = {}
    for model in models:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            spec = getattr(tensor, "k3", None)
            if spec is not None:
                state[f"model.{name}"] = sharded_tensor(f"model.{name}", tensor, spec, layout)
    return state


class DirectSaveStrategy(TorchDistSaveShardedStrategy):
    """megatron's torch_dist format written by torch's own file writer in this process.

    megatron's writer starts a fresh Python process on the first save, which costs seconds on a small machine.
    Files are fsynced by the writer.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )  # fmt: skip
        writer = dcp.FileSystemWriter(checkpoint_dir, single_file_per_rank=True, sync_files=True)
        dcp.save(mcore_to_pyt_state_dict(state, False), storage_writer=writer, planner=planner)
        dist.barrier()
