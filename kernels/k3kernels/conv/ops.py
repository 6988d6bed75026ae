"""The public entry of the short convolution."""

import torch
from torch import Tensor

from k3kernels.checks import check_choice, check_cu_seqlens, check_same_device, check_tensor
from k3kernels.conv.reference import short_convolution_naive, short_convolution_torch

BACKENDS = ("auto", "naive", "torch")


def short_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution over tokens, then SiLU; it restarts at every document.

        y_t = silu( sum_w weight[:, w] x_{t-(W-1)+w} ),  inputs before a document are its initial state, or zero

    Args:
        x: [B, T, C]; fp32, bf16, fp16 or fp64.
        weight: [C, W]; the last tap multiplies the current token. No bias.
        cu_seqlens: integer [N+1], documents of a packed stream with B = 1.
        initial_state: [N, C, W-1], the inputs before each document, oldest first.
        output_final_state: also return the last W-1 inputs of each document.
        backend: auto, naive or torch.

    Returns:
        y [B, T, C] in x's dtype; the sum and SiLU are fp32, rounded once. The final state [N, C, W-1] in x's dtype, or
        None. Gradients flow to x, weight and initial_state.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    check_tensor("x", x, (None,) * 3, "[B, T, C]")
    B, T, C = x.shape
    check_tensor("weight", weight, (C, None), "[C, W]")
    W = weight.shape[1]
    if W < 1:
        raise ValueError(f"weight: expected shape [C, W] with W >= 1, got {list(weight.shape)}")
    documents = B if cu_seqlens is None else check_cu_seqlens(cu_seqlens, B, T)
    if initial_state is not None:
        check_tensor("initial_state", initial_state, (documents, C, W - 1), "[N, C, W-1]")
    check_same_device("x", x, {"weight": weight, "initial_state": initial_state})
    check_choice("backend", backend, BACKENDS)
    implementation = short_convolution_naive if backend == "naive" else short_convolution_torch
    y, state = implementation(x, weight, cu_seqlens=cu_seqlens, initial_state=initial_state)
    return y, state.to(x.dtype) if output_final_state else None


@torch.no_grad()
def short_convolution_step(x: Tensor, weight: Tensor, state: Tensor, *, backend: str = "auto") -> Tensor:
    """Decoding: the next T inputs (usually 1) of each sequence; `state` is advanced in place. No gradients.

    Args:
        x: [B, T, C]; weight: [C, W]; state: [B, C, W-1], the last inputs, oldest first; may be a strided view.

    Returns:
        y [B, T, C] in x's dtype, as `short_convolution` gives it.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    check_tensor("x", x, (None,) * 3, "[B, T, C]")
    check_tensor("weight", weight, (x.shape[2], None), "[C, W]")
    check_tensor("state", state, (x.shape[0], x.shape[2], weight.shape[1] - 1), "[B, C, W-1]")
    y, end = short_convolution(x, weight, initial_state=state, output_final_state=True, backend=backend)
    assert end is not None
    state.copy_(end)
    return y
