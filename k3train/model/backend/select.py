"""Choosing the backend of a run."""

from __future__ import annotations

import torch

from k3train.errors import EnvironmentError_
from k3train.model.backend.local import Backend
from k3train.model.backend.torch_gpu import TorchBackend


def make_backend(name: str, device: torch.device) -> Backend:
    """`auto` is local on CPU and the best available on GPU.

    Raises EnvironmentError_ when the named backend cannot run here.
    """
    if name == "local" or (name == "auto" and device.type != "cuda"):
        return Backend()
    if name in ("auto", "torch"):
        return TorchBackend()
    raise EnvironmentError_(f"model.backend={name} is not available on {device.type}; use model.backend=local")
