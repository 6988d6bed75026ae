"""Choosing the backend of a run, and refusing at start what this machine cannot run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from k3kernels.peaks import PEAKS
from k3train.config.precision import Precision, check_recipe
from k3train.errors import EnvironmentError_
from k3train.model.backend import te_library
from k3train.model.backend.local import Backend
from k3train.model.backend.te import TEBackend
from k3train.model.backend.te_library import TransformerEngine
from k3train.model.backend.torch_gpu import TorchBackend, head_dims_reason


def chip(device: torch.device) -> tuple[str, tuple[int, int]]:
    """Name and compute capability of a GPU."""
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)


def make_backend(
    name: str, device: torch.device, *, dtype: torch.dtype = torch.bfloat16, precision: Precision | None = None,
    head_dims: tuple[int, int] = (128, 128), load: Callable[[], TransformerEngine] = te_library.load,
    chip: Callable[[torch.device], tuple[str, tuple[int, int]]] = chip,
) -> Backend:  # fmt: skip
    """The backend `model.backend` names. `auto` is local on CPU; on GPU it is te where that runs, else torch.

    head_dims: key and value dimension of full attention. Raises EnvironmentError_ with what to type instead: a recipe
    that the chip cannot run, transformer-engine missing or built for another torch, head dimensions without a kernel.
    """
    precision = precision or Precision()
    recipe = precision.recipe
    # only a scale for a whole tensor needs its largest magnitude
    PEAKS.wanted = recipe == "fp8_current"
    PEAKS.forget()
    if device.type != "cuda":
        if recipe is not None:
            raise EnvironmentError_(
                f"train.precision={recipe} needs a GPU and this runs on {device.type}; type train.precision=auto"
            )
        if name == "te":
            raise EnvironmentError_(
                f"model.backend=te needs a GPU and this runs on {device.type}; type model.backend=auto"
            )
        return TorchBackend() if name == "torch" else Backend()
    if recipe is not None:
        described, capability = chip(device)
        check_recipe(recipe, capability, described)
        if name in ("local", "torch"):
            raise EnvironmentError_(
                f"train.precision={recipe} needs model.backend=te; type that, or train.precision=bf16"
            )
    if name == "local":
        return Backend()
    if name == "te" or recipe is not None:
        return _transformer_engine(load, precision, dtype, head_dims)
    if name == "auto" and dtype == torch.bfloat16:
        try:
            return _transformer_engine(load, precision, dtype, head_dims)
        except EnvironmentError_ as reason:
            return _torch(head_dims, dtype, why=str(reason))
    return _torch(head_dims, dtype)


def _transformer_engine(
    load: Callable[[], TransformerEngine], precision: Precision, dtype: torch.dtype, head_dims: tuple[int, int]
) -> Backend:
    wanted = "model.backend=te" if precision.recipe is None else f"train.precision={precision.recipe}"
    if dtype != torch.bfloat16:
        raise EnvironmentError_(
            f"{wanted} computes in bf16, not fp32; type train.precision=bf16, or model.backend=torch"
        )
    if any(size % 8 for size in head_dims) or max(head_dims) > 256:
        raise EnvironmentError_(
            f"{wanted}: no fused attention takes head dimensions {head_dims[0]} (keys: model.mla.nope_dim + shared_dim) "
            f"and {head_dims[1]} (model.mla.v_dim): multiples of 8 up to 256, 192 and 128 in K3; change them, or type "
            "model.backend=local (masked attention: memory grows with the square of the sequence)"
        )
    try:
        return TEBackend(load(), precision)
    except EnvironmentError_ as error:
        instead = "model.backend=torch" + ("" if precision.recipe is None else " train.precision=bf16")
        raise EnvironmentError_(f"{wanted}: {error}; or type {instead}") from error
    except RuntimeError as error:  # the library's own word on the recipe
        raise EnvironmentError_(f"{wanted}: transformer-engine says {error}; type train.precision=bf16") from error


def _torch(head_dims: tuple[int, int], dtype: torch.dtype, *, why: str = "") -> Backend:
    reason = head_dims_reason(*head_dims) if dtype != torch.float32 else None
    if reason is not None:
        raise EnvironmentError_(
            f"model.backend=torch: no kernel for head dimensions {head_dims} ({reason}); type model.backend=local "
            "(masked attention: memory grows with the square of the sequence)"
        )
    backend = TorchBackend()
    if why:
        backend.notice += f" ({why})"
    return backend
