"""The grouped product of experts in BF16 on a GPU, whose weight gradient goes into megatron's buffer at once.

Almost all parameters of a mixture of experts are the experts'. Their gradient is 2 bytes a parameter written and read
again just to be added to the fp32 buffer; here the product adds to the buffer itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from k3kernels.grouped import add_weight_gradient


class GroupedLinear(torch.autograd.Function):
    """x [N, in] bf16 sorted by expert, weight [E, out, in] bf16, ends int32 [E] on the device -> [N, out]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, ends)
        ctx.weight = weight
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, ends), weight = ctx.saved_tensors, ctx.weight
        dy = dy.contiguous()
        dx = F.grouped_mm(dy, weight, offs=ends) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None
        if not hasattr(weight, "main_grad"):
            return dx, F.grouped_mm(dy.T, x, offs=ends), None
        add_weight_gradient(weight.main_grad, dy, x.contiguous(), ends)
        weight.grad_added_to_main_grad = True  # megatron's hook then adds nothing
        return dx, placeholder(weight), None


_placeholders: dict[tuple[Any, ...], torch.Tensor] = {}


def placeholder(weight: torch.Tensor) -> torch.Tensor:
    """A gradient that nobody reads: hooks want one, of the parameter's shape. One buffer for all of a shape."""
    key = (weight.shape, weight.dtype, weight.device)
    if key not in _placeholders:
        _placeholders[key] = torch.empty_like(weight)
    return _placeholders[key].detach()
