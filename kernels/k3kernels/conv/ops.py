"""The public entries of the short convolution."""

from collections.abc import Sequence

import torch
from torch import Tensor

from k3kernels.checks import check_choice, check_cu_seqlens, check_same_device, check_tensor
from k3kernels.conv.reference import last_inputs, short_convolution_naive, short_convolution_torch

BACKENDS = ("auto", "naive", "torch", "triton")
TRITON_MAX_WIDTH = 4


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
        x: [B, T, C]; fp32, bf16, fp16 (fp64 on the naive and torch backends).
        weight: [C, W]; the last tap multiplies the current token. No bias.
        cu_seqlens: integer [N+1], documents of a packed stream with B = 1.
        initial_state: [N, C, W-1], the inputs before each document, oldest first.
        output_final_state: also return the last W-1 inputs of each document.
        backend: auto (Triton on CUDA for W <= 4, else torch), naive, torch or triton.

    Returns:
        y [B, T, C] in x's dtype; the sum and SiLU are fp32, rounded once. The final state [N, C, W-1] in x's dtype, or
        None. Gradients flow to x, weight and initial_state.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    states = None if initial_state is None else [initial_state]
    ys, finals = _convolve(["x"], [x], ["weight"], [weight], cu_seqlens, states, output_final_state, backend)
    return ys[0], None if finals is None else finals[0]


def short_convolution_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    initial_states: tuple[Tensor, Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """`short_convolution` of a layer's q, k and v, in one launch on a GPU.

    Args:
        q, k: [B, T, H * K]; v: [B, T, HV * V]; one dtype. *_weight: [C, W] each, one width.
        initial_states: the states of q, k and v, [N, C, W-1] each. Other arguments as in `short_convolution`.

    Returns:
        q, k, v convolved, and their final states or None.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    weights = [q_weight, k_weight, v_weight]
    ys, finals = _convolve(
        ["q", "k", "v"], [q, k, v], ["q_weight", "k_weight", "v_weight"], weights, cu_seqlens, initial_states,
        output_final_state, backend,
    )  # fmt: skip
    return ys[0], ys[1], ys[2], None if finals is None else (finals[0], finals[1], finals[2])


def _convolve(
    names: Sequence[str],
    xs: Sequence[Tensor],
    weight_names: Sequence[str],
    weights: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    states: Sequence[Tensor] | None,
    output_final_state: bool,
    backend: str,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Checks and runs one to three convolutions over the same tokens."""
    check_tensor(names[0], xs[0], (None,) * 3, "[B, T, C]")
    B, T, _ = xs[0].shape
    documents = B if cu_seqlens is None else check_cu_seqlens(cu_seqlens, B, T)
    check_tensor(weight_names[0], weights[0], (xs[0].shape[2], None), "[C, W]")
    W = weights[0].shape[1]
    if W < 1:
        raise ValueError(f"{weight_names[0]}: expected shape [C, W] with W >= 1, got {list(weights[0].shape)}")
    if states is not None and len(states) != len(xs):
        raise ValueError(f"initial_states: expected {len(xs)} tensors, got {len(states)}")
    for i, (name, x, weight_name, weight) in enumerate(zip(names, xs, weight_names, weights)):
        check_tensor(name, x, (B, T, None), "[B, T, C]")
        if x.dtype != xs[0].dtype:
            raise TypeError(f"{name}: expected the dtype of {names[0]}, {xs[0].dtype}, got {x.dtype}")
        check_tensor(weight_name, weight, (x.shape[2], W), "[C, W]")
        state = None if states is None else states[i]
        state_name = "initial_state" if len(xs) == 1 else f"initial_states[{i}]"
        if state is not None:
            check_tensor(state_name, state, (documents, x.shape[2], W - 1), "[N, C, W-1]")
        check_same_device(names[0], xs[0], {name: x, weight_name: weight, state_name: state})
    check_choice("backend", backend, BACKENDS)
    if backend == "auto":
        backend = "triton" if xs[0].is_cuda and W <= TRITON_MAX_WIDTH and xs[0].element_size() < 8 else "torch"

    each_state = [None] * len(xs) if states is None else [s.to(x.dtype) for s, x in zip(states, xs)]
    if backend == "naive":
        results = [
            short_convolution_naive(x, w, cu_seqlens=cu_seqlens, initial_state=s)
            for x, w, s in zip(xs, weights, each_state)
        ]
        return [y for y, _ in results], [s.to(y.dtype) for y, s in results] if output_final_state else None
    if backend == "triton":
        if W > TRITON_MAX_WIDTH:
            raise ValueError(f"{weight_names[0]}: Triton takes W <= {TRITON_MAX_WIDTH}, got {W}; use backend='torch'")
        from k3kernels.conv.triton_conv import short_convolution_triton  # imports triton, which CPU users may lack

        ys = short_convolution_triton(list(xs), list(weights), cu_seqlens=cu_seqlens, initial_states=each_state)
    else:
        ys = [
            short_convolution_torch(x, w, cu_seqlens=cu_seqlens, initial_state=s)
            for x, w, s in zip(xs, weights, each_state)
        ]
    if not output_final_state:
        return ys, None
    return ys, [last_inputs(x, W, cu_seqlens, s) for x, s in zip(xs, each_state)]


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
    check_same_device("x", x, {"weight": weight, "state": state})
    check_choice("backend", backend, BACKENDS)
    fits = weight.shape[1] <= TRITON_MAX_WIDTH and x.element_size() < 8
    if backend == "triton" or (backend == "auto" and x.is_cuda and fits):
        if not fits:
            raise ValueError(
                f"backend: triton takes W <= {TRITON_MAX_WIDTH} and at most 32 bits a value, got W = {weight.shape[1]}, "
                f"{x.dtype}; use backend='torch'"
            )
        # imports triton, which CPU users may lack
        from k3kernels.conv.triton_advance import short_convolution_step_triton

        return short_convolution_step_triton(x, weight, state)
    y, end = short_convolution(x, weight, initial_state=state, output_final_state=True, backend=backend)
    assert end is not None
    state.copy_(end)
    return y
