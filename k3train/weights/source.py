"""Where weights come from: anything that hands out whole tensors under our names, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from k3train.errors import WeightsError


class TensorSource(Protocol):
    """Reads tensors under our parameter names; nobody has to hold more than one of them."""

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """The whole tensor on CPU, or expert `expert` of a stacked one. Raises WeightsError when there is none."""
        ...


class MappingSource:
    """Tensors from a mapping of our names to tensors or to functions that make them, such as a state dict."""

    def __init__(self, tensors: Mapping[str, Tensor | Callable[[], Tensor]], origin: str = "the model") -> None:
        self.tensors, self.origin = tensors, origin

    def read(self, name: str, expert: int | None = None) -> Tensor:
        if name not in self.tensors:
            raise WeightsError(f"{self.origin} has no tensor {name}")
        value = self.tensors[name]
        tensor = (value if isinstance(value, Tensor) else value()).detach()
        return (tensor if expert is None else tensor[expert]).cpu()


def check_finite(tensor: Tensor, name: str, origin: str) -> Tensor:
    """Return `tensor`, or raise WeightsError when it holds NaN or Inf."""
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        bad = int((~torch.isfinite(tensor)).sum())
        raise WeightsError(f"{origin}: {name} holds {bad} values that are NaN or Inf")
    return tensor
