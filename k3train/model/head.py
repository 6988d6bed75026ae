"""The language model's head: logits, or the loss of every token without ever holding all logits."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from k3kernels.linear_cross_entropy import linear_cross_entropy
from k3train.model.context import ModelContext


@functools.cache
def _head_class(linear: type[nn.Module]) -> type[nn.Module]:
    class Head(linear):  # type: ignore[misc, valid-type]
        """The backend's column-parallel product over the vocabulary, which knows the loss as well.

        The loss is found inside of the module's forward, so that whoever gathers a module's parameters around its
        forward (ZeRO-3) finds them in use there and nowhere else.
        """

        def __init__(self, ctx: ModelContext) -> None:
            super().__init__(ctx, ctx.model.hidden_size, ctx.model.vocab_size)
            self.ctx = ctx

        def forward(
            self, hidden: torch.Tensor, labels: torch.Tensor | None = None, weights: torch.Tensor | None = None
        ) -> torch.Tensor:
            """hidden [T, d], already inside the tensor-parallel region -> logits [T, V / TP], or with labels int64 [T]
            the cross entropy fp32 [T], in BF16 products whatever the recipe. weights fp32 [T]: see `PackedStream`."""
            if labels is None:
                return super().forward(hidden)
            layout = self.ctx.layout
            return linear_cross_entropy(
                hidden, self.weight, labels, token_weights=weights, group=layout.tp if layout.sizes.tensor > 1 else None,
                chunk=self.ctx.model.loss_chunk,
            )  # fmt: skip

    return Head


def make_head(ctx: ModelContext) -> Any:
    """The head in the backend's linear class."""
    return _head_class(ctx.backend.column)(ctx)
