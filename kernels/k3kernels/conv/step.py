"""One token of a layer's three convolutions at once: a decode step is many small kernels, so this is one of them."""

import torch
from torch import Tensor

from k3kernels.checks import check_choice, check_same_device, check_tensor
from k3kernels.conv.ops import TRITON_MAX_WIDTH, short_convolution_step

BACKENDS = ("auto", "torch", "triton")
Three = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def short_convolution_step_qkv(xs: Three, weights: Three, states: Three, *, backend: str = "auto") -> Three:
    """`short_convolution_step` of q, k and v for one token a sequence; the states are advanced in place. No gradients.

    Args:
        xs: three [B, C] of one shape; weights: three [C, W]; states: three [B, C, W-1] in the dtype of xs.

    Returns:
        three [B, C] like xs.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    B, C = check_tensor("xs[0]", xs[0], (None, None), "[B, C]").shape
    W = check_tensor("weights[0]", weights[0], (C, None), "[C, W]").shape[1]
    for i, (x, weight, state) in enumerate(zip(xs, weights, states)):
        check_tensor(f"xs[{i}]", x, (B, C), "[B, C]")
        check_tensor(f"weights[{i}]", weight, (C, W), "[C, W]")
        check_tensor(f"states[{i}]", state, (B, C, W - 1), "[B, C, W-1]")
        check_same_device("xs[0]", xs[0], {f"xs[{i}]": x, f"weights[{i}]": weight, f"states[{i}]": state})
    check_choice("backend", backend, BACKENDS)
    fits = 2 <= W <= TRITON_MAX_WIDTH and all(s.dtype == xs[0].dtype and s.is_contiguous() for s in states)
    if backend == "triton" or (backend == "auto" and xs[0].is_cuda and fits):
        from k3kernels.conv.triton_step import step_qkv_triton  # imports triton, which CPU users may lack

        return step_qkv_triton(xs, weights, states)
    q, k, v = (short_convolution_step(x[:, None], w, s)[:, 0] for x, w, s in zip(xs, weights, states))
    return q, k, v
