"""Parameters that know their logical shape, their sharding and their initialisation.

The value of a parameter is a function of (seed, name) alone: each is drawn whole from its own generator and the
rank keeps its slice, so every parallel layout starts from the same model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass

import torch
from torch import nn

from k3train.parallel.layout import Layout

INITS = ("normal", "zeros", "ones", "conv", "dt_bias")


@dataclass(frozen=True)
class ParameterSpec:
    """shape: the whole logical tensor. tensor_axis: the axis cut over tensor-parallel ranks, or None (replicated).

    expert: axis 0 counts experts and is cut over expert-parallel ranks. init: one of INITS. head_rows: the output rows
    of one attention head, in consecutive blocks that are matrices of their own (report: Per-Head Muon); () for a
    matrix that is not split by heads.
    """

    shape: tuple[int, ...]
    tensor_axis: int | None = None
    expert: bool = False
    init: str = "normal"
    std: float = 0.02
    head_rows: tuple[int, ...] = ()


def split_by_heads(linear: nn.Module, *rows: int) -> None:
    """Mark a column-parallel projection's weight as blocks of `rows` output channels a head."""
    weight = linear.weight
    weight.k3 = dataclasses.replace(weight.k3, head_rows=rows)  # type: ignore[union-attr, arg-type]


def annotate(tensor: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    """Attach the spec and the attributes that megatron's DDP, optimizer and gradient norm read."""
    tensor.k3 = spec  # type: ignore[attr-defined]
    # an expert is never a tensor-parallel duplicate: expert-tensor-parallel size is 1 and experts have their own groups
    tensor.tensor_model_parallel = spec.tensor_axis is not None or spec.expert  # type: ignore[attr-defined]
    tensor.partition_dim = -1 if spec.tensor_axis is None else spec.tensor_axis  # type: ignore[attr-defined]
    tensor.partition_stride = 1  # type: ignore[attr-defined]
    tensor.allreduce = not spec.expert  # type: ignore[attr-defined]
    return tensor


def local_shape(spec: ParameterSpec, layout: Layout) -> tuple[int, ...]:
    shape = list(spec.shape)
    if spec.tensor_axis is not None:
        shape[spec.tensor_axis] //= layout.sizes.tensor
    if spec.expert:
        shape[0] //= layout.sizes.expert
    return tuple(shape)


def new_parameter(
    spec: ParameterSpec, layout: Layout, dtype: torch.dtype, *, sum_over_tensor: bool = False
) -> nn.Parameter:
    """An uninitialised local shard. `sum_over_tensor` marks a replicated parameter whose gradient is partial on
    each tensor rank (it saw its own tokens or its own heads) and must be summed."""
    param = nn.Parameter(torch.empty(local_shape(spec, layout), dtype=dtype))
    annotate(param, spec)
    if sum_over_tensor and layout.sizes.tensor > 1:
        param.sum_over_tensor = True  # type: ignore[attr-defined]
    return param


def draw(name: str, spec: ParameterSpec, seed: int, device: torch.device) -> torch.Tensor:
    """The whole parameter in fp32. dt_bias: inverse softplus of log-uniform [1e-3, 1e-1] (spec 2.3)."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest, "little") >> 1)
    if spec.init == "normal":
        return torch.empty(spec.shape, device=device).normal_(0.0, spec.std, generator=generator)
    if spec.init == "zeros":
        return torch.zeros(spec.shape, device=device)
    if spec.init == "ones":
        return torch.ones(spec.shape, device=device)
    if spec.init == "conv":  # torch's Conv1d default: uniform within 1/sqrt(fan in), here the number of taps
        bound = 1.0 / math.sqrt(spec.shape[-1])
        return torch.empty(spec.shape, device=device).uniform_(-bound, bound, generator=generator)
    if spec.init == "dt_bias":
        low, high = math.log(1e-3), math.log(1e-1)
        dt = torch.empty(spec.shape, device=device).uniform_(low, high, generator=generator).exp_().clamp_(min=1e-4)
        return dt + torch.log(-torch.expm1(-dt))
    raise ValueError(f"unknown initialisation {spec.init!r}; one of {INITS}")


def shard(full: torch.Tensor, spec: ParameterSpec, layout: Layout) -> torch.Tensor:
    """This rank's slice of a whole logical tensor."""
    if spec.tensor_axis is not None:
        full = full.chunk(layout.sizes.tensor, dim=spec.tensor_axis)[layout.tp.rank()]
    if spec.expert:
        full = full.chunk(layout.sizes.expert, dim=0)[layout.ep.rank()]
    return full


@torch.no_grad()
def initialize_parameters(module: nn.Module, layout: Layout, seed: int) -> None:
    """Fill every annotated parameter and buffer of `module` (names are global: layers are keyed by global index)."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        spec: ParameterSpec | None = getattr(tensor, "k3", None)
        if spec is None or tensor.is_meta:
            continue
        if spec.expert:  # one draw an expert: no rank holds all of them
            first = layout.ep.rank() * tensor.shape[0]
            single = ParameterSpec(spec.shape[1:], spec.tensor_axis, False, spec.init, spec.std)
            for e in range(tensor.shape[0]):
                tensor[e].copy_(draw(f"{name}.{first + e}", single, seed, tensor.device))
        else:
            tensor.copy_(shard(draw(name, spec, seed, tensor.device), spec, layout))
