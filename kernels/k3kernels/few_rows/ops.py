"""The public entry of the grouped linear for few rows an expert."""

import torch
from torch import Tensor

from k3kernels.checks import check_choice, check_same_device, check_tensor

BACKENDS = ("auto", "torch", "triton")


@torch.no_grad()
def few_rows_linear(x: Tensor, weight: Tensor, counts: Tensor, *, backend: str = "auto") -> Tensor:
    """Each row of x times the transpose of its expert's weight; right for any number of rows, fast for few.

    Args:
        x: [N, in], bf16 or fp32, sorted by expert. weight: [E, out, in] in x's dtype.
        counts: int32 or int64 [E], rows of each expert, which add up to N (not checked).
        backend: auto (Triton on CUDA, else torch), torch or triton.

    Returns:
        y [N, out] like x, accumulated in fp32. No gradients.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    check_tensor("x", x, (None, None), "[N, in]")
    check_tensor("weight", weight, (None, None, x.shape[1]), "[E, out, in]")
    if x.dtype not in (torch.bfloat16, torch.float32) or weight.dtype != x.dtype:
        raise TypeError(f"x, weight: expected one dtype, bfloat16 or float32, got {x.dtype} and {weight.dtype}")
    if counts.dtype not in (torch.int32, torch.int64) or tuple(counts.shape) != (weight.shape[0],):
        raise ValueError(
            f"counts: expected integers [E] = [{weight.shape[0]}], got {counts.dtype} {list(counts.shape)}"
        )
    check_same_device("x", x, {"weight": weight, "counts": counts})
    check_choice("backend", backend, BACKENDS)
    if backend == "triton" or (backend == "auto" and x.is_cuda):
        from k3kernels.few_rows.triton_few import few_rows_triton  # imports triton, which CPU users may lack

        return few_rows_triton(x, weight, counts)
    parts = [part @ w.T for part, w in zip(x.split(counts.tolist()), weight)]
    return torch.cat(parts)
