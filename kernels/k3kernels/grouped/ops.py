"""The public entry of the grouped weight gradient."""

import torch
from torch import Tensor

from k3kernels.checks import check_choice, check_same_device, check_tensor
from k3kernels.grouped.reference import add_weight_gradient_torch

BACKENDS = ("auto", "torch", "triton")


def add_weight_gradient(into: Tensor, dy: Tensor, x: Tensor, ends: Tensor, *, backend: str = "auto") -> None:
    """into_e += dy_e^T x_e for every expert e, in place: the weight gradient of a grouped product, without a copy of it.

    Args:
        into: fp32 [E, out, in], contiguous; experts without rows are not touched.
        dy: [N, out], x: [N, in], one dtype (bf16, fp16, fp32), contiguous, rows sorted by expert.
        ends: int32 [E], the row after the last one of each expert; ends[-1] = N. Stays on the device with Triton.
        backend: auto (Triton on CUDA, else torch), torch or triton.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    check_tensor("into", into, (None, None, None), "[E, out, in]")
    check_tensor("dy", dy, (None, into.shape[1]), "[N, out]")
    check_tensor("x", x, (dy.shape[0], into.shape[2]), "[N, in]")
    if into.dtype != torch.float32:
        raise TypeError(f"into: expected torch.float32, got {into.dtype}")
    if x.dtype != dy.dtype:
        raise TypeError(f"x: expected {dy.dtype} like dy, got {x.dtype}")
    if not isinstance(ends, Tensor) or ends.dtype != torch.int32 or ends.shape != into.shape[:1]:
        raise TypeError(
            f"ends: expected torch.int32 [{into.shape[0]}], got {getattr(ends, 'dtype', type(ends))} "
            f"{list(getattr(ends, 'shape', []))}"
        )
    for name, tensor in (("into", into), ("dy", dy), ("x", x)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tuple(tensor.stride())}")
    check_same_device("into", into, {"dy": dy, "x": x, "ends": ends})
    check_choice("backend", backend, BACKENDS)
    if backend == "triton" or (backend == "auto" and into.is_cuda):
        from k3kernels.grouped.triton_gradient import launch

        launch(into, dy, x, ends)
    else:
        add_weight_gradient_torch(into, dy, x, ends)
