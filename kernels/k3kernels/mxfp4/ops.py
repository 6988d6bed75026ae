"""The public entry of the grouped linear over packed experts."""

import torch
from torch import Tensor

from k3kernels.checks import check_choice, check_same_device, check_tensor
from k3kernels.mxfp4.reference import GROUP, grouped_linear_torch

BACKENDS = ("auto", "torch", "triton")


@torch.no_grad()
def mxfp4_grouped_linear(
    x: Tensor, packed: Tensor, scale: Tensor, counts: Tensor, *, largest_scale: int = 254, backend: str = "auto"
) -> Tensor:
    """Each row of x times the transpose of its expert's weight, which stays packed in memory.

    Args:
        x: [N, in], bf16 or fp32, sorted by expert; in is a multiple of 32.
        packed: uint8 [E, out, in/2], two E2M1 codes a byte (even column in the low nibble).
        scale: uint8 [E, out, in/32], E8M0; bytes 0-254.
        counts: int32 or int64 [E], rows of each expert, which add up to N (not checked on CUDA: it would wait for the
            device). May live on the CPU.
        largest_scale: no byte of `scale` is above it (not checked). At 128 or below, scales of at most 2, decoding on a
            GPU takes one multiplication less.
        backend: auto (Triton on CUDA, else torch), torch or triton.

    Returns:
        y [N, out] like x, accumulated in fp32. No gradients: packed experts are for inference.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    check_tensor("x", x, (None, None), "[N, in]")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"x: expected bfloat16 or float32, got {x.dtype}")
    width = x.shape[1]
    if width == 0 or width % GROUP:
        raise ValueError(f"x: expected a width that is a multiple of {GROUP}, got {width}")
    if packed.dim() != 3:
        raise ValueError(f"packed: expected shape [E, out, in/2], got {list(packed.shape)}")
    experts, out, _ = packed.shape
    for name, value, columns in (("packed", packed, width // 2), ("scale", scale, width // GROUP)):
        if value.dtype != torch.uint8:
            raise TypeError(f"{name}: expected uint8, got {value.dtype}")
        if tuple(value.shape) != (experts, out, columns):
            raise ValueError(f"{name}: expected shape {[experts, out, columns]} for x {list(x.shape)} and {experts} "
                             f"experts, got {list(value.shape)}")  # fmt: skip
    if counts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"counts: expected int32 or int64, got {counts.dtype}")
    if tuple(counts.shape) != (experts,):
        raise ValueError(f"counts: expected shape [E] = [{experts}], got {list(counts.shape)}")
    if counts.device.type == "cpu" and (int(counts.sum()) != x.shape[0] or bool((counts < 0).any())):
        raise ValueError(f"counts: must not be negative and must add up to N = {x.shape[0]}, got {counts.tolist()}")
    check_same_device("x", x, {"packed": packed, "scale": scale})
    check_choice("backend", backend, BACKENDS)
    if backend == "triton" or (backend == "auto" and x.is_cuda):
        from k3kernels.mxfp4.triton_linear import grouped_linear_triton  # imports triton, which CPU users may lack

        counts = counts.to(x.device, non_blocking=True)
        return grouped_linear_triton(x, packed, scale, counts, largest_scale=largest_scale)
    return grouped_linear_torch(x, packed, scale, counts)
