"""Put weights from anywhere into the part of the model that this rank holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from k3train.errors import WeightsError
from k3train.model.parameters import ParameterSpec, shard
from k3train.parallel.layout import Layout
from k3train.weights.reader import HFFolder
from k3train.weights.source import TensorSource


@torch.no_grad()
def load_weights(models: Iterable[nn.Module], source: TensorSource, layout: Layout) -> int:
    """Fill every annotated parameter and buffer of this rank's model chunks from `source`; returns how many.

    A rank reads its own experts and, from a Hugging Face folder, its own tensor-parallel shards only.
    Raises WeightsError naming a tensor that is missing or has another shape than the model.
    """
    count = 0
    for model in models:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            spec: ParameterSpec | None = getattr(tensor, "k3", None)
            if spec is None:
                continue
            if spec.expert:
                first = layout.ep.rank() * tensor.shape[0]
                for i in range(tensor.shape[0]):
                    _fill(tensor[i], source.read(name, first + i), f"{name}, expert {first + i}")
            elif spec.tensor_axis is not None and layout.sizes.tensor > 1 and isinstance(source, HFFolder):
                size = tensor.shape[spec.tensor_axis]
                start = layout.tp.rank() * size
                _fill(tensor, source.read_part(name, spec.tensor_axis, start, start + size), name)
            else:
                _fill(tensor, shard(source.read(name), spec, layout), name)
            count += 1
    return count


def _fill(target: torch.Tensor, value: torch.Tensor, name: str) -> None:
    if target.shape != value.shape:
        raise WeightsError(
            f"{name}: the weights have shape {list(value.shape)}, this rank's model {list(target.shape)}"
        )
    target.copy_(value)
