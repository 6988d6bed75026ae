"""The state of a moment, in CPU memory: what a checkpoint is written from while training goes on.

One pass over the tensors is all that the steps wait for. Gathering, reshaping and planning, which megatron does on its
optimizer, are done later on a twin of it that holds the copies.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.optim import Optimizer


class HostCopies:
    """Copies of tensors in CPU memory; `wait` until those from a GPU have arrived."""

    def __init__(self) -> None:
        self._on_gpu = False

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor.clone()
        self._on_gpu = True
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()


def optimizer_twin(optimizer: Any, copies: HostCopies) -> Any | None:
    """A megatron optimizer like this one whose parameters and states are copies; good for `sharded_state_dict` alone.

    None for kinds of optimizers whose state cannot be taken apart like that: they are gathered while the steps wait.
    """
    if hasattr(optimizer, "chained_optimizers"):
        parts = [optimizer_twin(one, copies) for one in optimizer.chained_optimizers]
        if any(part is None for part in parts):
            return None
        twin = _like(optimizer)
        twin.chained_optimizers = parts
        return twin
    if not isinstance(optimizer, DistributedOptimizer) or type(optimizer.optimizer).__name__ == "HybridDeviceOptimizer":
        return None
    if optimizer.config.use_precision_aware_optimizer:
        return None
    twin = _like(optimizer)
    if isinstance(optimizer.optimizer, Optimizer):
        twin.optimizer = _inner_twin(optimizer.optimizer, copies)
    return twin


def _inner_twin(inner: Optimizer, copies: HostCopies) -> Optimizer:
    twin = _like(inner)
    twin.state, twin.param_groups = defaultdict(dict), []
    for group in inner.param_groups:
        params = []
        for param in group["params"]:
            held = copies.copy(param)
            params.append(held)
            if param in inner.state:
                twin.state[held] = {
                    key: copies.copy(value) if isinstance(value, torch.Tensor) else value
                    for key, value in inner.state[param].items()
                }
        twin.param_groups.append({**group, "params": params})
    return twin


def _like(thing: Any) -> Any:
    twin = object.__new__(type(thing))
    twin.__dict__.update(thing.__dict__)
    return twin
