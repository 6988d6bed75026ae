"""Checkpoint state of optimizers whose state lies whole on every data-parallel rank (no ZeRO-1; Muon).

megatron's own form for them cannot hold a bf16 model with some fp32 parameters. Here each state tensor is saved under
its parameter's global name with the parameter's sharding, so it reshards like the weights do.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import nn

from k3train.engine.sharded_state import sharded_tensor
from k3train.model.parameters import ParameterSpec
from k3train.parallel.layout import Layout


def parts(optimizer: Any) -> list[Any]:
    """The megatron optimizers inside a chain."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def masters(optimizer: Any) -> dict[int, torch.Tensor]:
    """id of an fp32 master copy -> the bf16 parameter it stands for."""
    found = {}
    for one in parts(optimizer):
        for models, copies in zip(getattr(one, "float16_groups", []), getattr(one, "fp32_from_float16_groups", [])):
            found |= {id(copy): model for model, copy in zip(models, copies)}
    return found


def tensors(optimizer: Any, models: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor, ParameterSpec]]:
    """(key, tensor, spec) of every state tensor and master copy; the tensors are the live ones."""
    names = {id(p): n for m in models for n, p in m.named_parameters()}
    stands_for = masters(optimizer)
    for one in parts(optimizer):
        for group in one.optimizer.param_groups:
            for p in group["params"]:
                parameter = stands_for.get(id(p), p)
                name, spec = names[id(parameter)], parameter.k3
                if parameter is not p:
                    yield f"optimizer.master.{name}", p, spec
                for key, value in one.optimizer.state[p].items():
                    if isinstance(value, torch.Tensor) and value.shape == p.shape:
                        yield f"optimizer.{key}.{name}", value, spec


def allocate(optimizer: Any) -> None:
    """Zero states for every parameter, for a checkpoint to be read into."""
    for one in parts(optimizer):
        inner = one.optimizer
        # transformer-engine's Adam also asks whether it keeps master copies as remainders; megatron's copies are whole
        more = (False,) if "store_param_remainders" in signature(inner.initialize_state).parameters else ()
        for group in inner.param_groups:
            for p in group["params"]:
                if not inner.state[p]:
                    inner.initialize_state(p, *more)


def sharded(optimizer: Any, models: list[nn.Module], layout: Layout) -> dict[str, Any]:
    """The state to save or to read into: ShardedTensors by key, and the step counts of the groups."""
    content: dict[str, ShardedTensor] = {k: sharded_tensor(k, t, s, layout) for k, t, s in tensors(optimizer, models)}
    steps = [int(g.get("step", 0)) for one in parts(optimizer) for g in one.optimizer.param_groups]
    return {"tensors": content, "step": max(steps, default=0)}


@torch.no_grad()
def restore(optimizer: Any, models: list[nn.Module], loaded: dict[str, Any]) -> None:
    """Copy a loaded state into the live one."""
    for key, tensor, _ in tensors(optimizer, models):
        tensor.copy_(loaded["tensors"][key])
    for one in parts(optimizer):
        for group in one.optimizer.param_groups:
            if "step" in group or loaded["step"]:
                group["step"] = loaded["step"]
