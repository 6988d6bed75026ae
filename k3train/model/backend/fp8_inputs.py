"""One quantised copy of an input for all FP8 products that read it (`train.fp8_share_inputs`).

The projections of a layer read the same tensor: q, k, v and g of KDA, q_a, kv_a and g of full attention, gate and up of
an MLP together with the projection into the experts' width. Each would quantise it by itself and keep its own copy for
the weight gradient. Here the first one does, and the others find the copy by the identity of what they are given.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import torch

SHARING = re.compile(
    r"layers\.\d+\.(attention\.(q|k|v|g|q_a|kv_a)_proj|mlp\.(gate|up)_proj|"
    r"moe\.(latent_down|shared_experts\.(gate|up)_proj))"
)
"""Products whose input others of the same layer read too."""

Quantise = Callable[[torch.Tensor, object, bool], torch.Tensor]
"""x [N, in], recipe, whether backward will want it -> a quantised tensor of the same shape."""


class SharedInputs:
    """Quantised inputs by identity: the last one only, because products that share an input follow each other.

    The copy is forgotten with the tensor that it was made of. A tensor written in place since, another recipe, or a
    product with gradients after one without, gets a copy of its own.
    """

    def __init__(self, quantise: Quantise) -> None:
        self.quantise = quantise
        self.source: weakref.ref[torch.Tensor] | None = None
        self.key: tuple[Any, ...] = ()
        self.low: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, recipe: object) -> torch.Tensor:
        """The quantised form of x; its gradient is the gradient of x."""
        key = (x._version, id(recipe), torch.is_grad_enabled())
        if self.source is None or self.source() is not x or self.key != key or self.low is None:
            self.low = _Quantised.apply(x, recipe, self.quantise)
            self.key, self.source = key, weakref.ref(x, self._forget)
        low = self.low
        assert isinstance(low, torch.Tensor)
        return low

    def _forget(self, source: weakref.ref[torch.Tensor]) -> None:
        if source is self.source:
            self.source, self.low = None, None


class _Quantised(torch.autograd.Function):
    """Quantising as the identity that it stands for: gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, recipe: object, quantise: Quantise) -> torch.Tensor:
        return quantise(x.contiguous(), recipe, ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None
