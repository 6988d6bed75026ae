"""Routed experts that stay in MXFP4: 4.25 bits a weight in memory, decoded by the kernel that multiplies with them.

`PackedBackend` gives the model's expert modules packed stacks in place of parameters, so that a model is built without
ever holding an expanded expert; `fill_packed` copies the bytes of a folder into them.
"""

from __future__ import annotations

import torch
from torch import nn

from k3kernels.mxfp4 import mxfp4_grouped_linear
from k3train.errors import WeightsError
from k3train.inference.backend import InferenceBackend
from k3train.model.context import ModelContext
from k3train.model.parameters import ParameterSpec, local_shape
from k3train.parallel.layout import Layout
from k3train.weights.mxfp4 import GROUP, INVALID_SCALE
from k3train.weights.reader import HFFolder
from k3train.weights.source import TensorSource


class PackedStack(nn.Module):
    """One of w1, w2, w3 of this rank's experts: packed uint8 [E, out, in/2], scale uint8 [E, out, in/32], of which
    none is above `largest_scale`."""

    packed: torch.Tensor
    scale: torch.Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        experts, out, inputs = shape
        self.largest_scale = 0
        self.register_buffer("packed", torch.zeros(experts, out, inputs // 2, dtype=torch.uint8))
        self.register_buffer("scale", torch.zeros(experts, out, inputs // GROUP, dtype=torch.uint8))


class PackedBackend(InferenceBackend):
    """The inference backend, with packed experts. For inference: packed experts have no gradient."""

    name = "packed"

    def expert_weight(self, ctx: ModelContext, spec: ParameterSpec) -> nn.Module | nn.Parameter:
        return PackedStack(local_shape(spec, ctx.layout))

    def grouped_linear(self, x: torch.Tensor, weight: torch.Tensor | PackedStack, counts: torch.Tensor) -> torch.Tensor:
        """Rows of x [N, in], sorted by expert with counts [E] rows each, times the packed experts -> [N, out]."""
        if isinstance(weight, PackedStack):
            return mxfp4_grouped_linear(x, weight.packed, weight.scale, counts, largest_scale=weight.largest_scale)
        return super().grouped_linear(x, weight, counts)


def all_packed(source: TensorSource) -> bool:
    """Whether `source` is a folder that holds every routed expert in MXFP4."""
    if not isinstance(source, HFFolder):
        return False
    routed = [entry for entry in source.table.values() if entry.is_routed_expert]
    return bool(routed) and all(source.is_packed(entry) for entry in routed)


@torch.no_grad()
def fill_packed(model: nn.Module, source: HFFolder, layout: Layout) -> int:
    """Copy this rank's packed experts from `source` into the model's stacks; returns how many matrices.

    Raises WeightsError for a scale byte 255 (NaN), as decoding does.
    """
    count = 0
    for name, stack in model.named_modules():
        if not isinstance(stack, PackedStack):
            continue
        experts = stack.packed.shape[0]
        first = layout.ep.rank() * experts
        for i in range(experts):
            packed, scale = source.read_packed(name, first + i)
            if (scale == INVALID_SCALE).any():
                raise WeightsError(
                    f"{source.folder}: {name}, expert {first + i} has scale bytes 255 (NaN); the file is damaged, or "
                    "its writer met NaN: export it again"
                )
            stack.packed[i].copy_(packed)
            stack.scale[i].copy_(scale)
            stack.largest_scale = max(stack.largest_scale, int(scale.max()))
            count += 1
    return count
