"""The parts that inference builds a model of: torch's products, norms in one kernel, one set of borders a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from k3kernels.norm.rms import rms_norm
from k3train.model.backend.local import RMSNorm
from k3train.model.backend.torch_gpu import TorchBackend


class InferenceNorm(RMSNorm):
    """`RMSNorm` as one kernel on a GPU. x [N, width]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or not x.is_cuda:
            return super().forward(x)
        return rms_norm(x, self.weight, eps=self.eps)


class InferenceBackend(TorchBackend):
    """The torch backend for a model that is read, on one device of any kind."""

    name = "inference"
    norm = InferenceNorm

    def __init__(self) -> None:
        self._borders: tuple[torch.Tensor, torch.Tensor] | None = None

    def grouped_linear(self, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """As the torch backend; a layer's three products come with the same `counts`, whose sums are kept."""
        if not (x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] > 0):
            return super().grouped_linear(x, weight, counts)
        if self._borders is None or self._borders[0] is not counts:
            self._borders = (counts, counts.cumsum(0, dtype=torch.int32))
        return F.grouped_mm(x, weight.transpose(1, 2), offs=self._borders[1])
