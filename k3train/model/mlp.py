"""The dense gated MLP: the first layer's, and the shared experts'."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from k3train.model.context import ModelContext
from k3train.model.recompute import consumed_later
from k3train.model.situ import gated_activation


class GatedMLP(nn.Module):
    """down(act(gate x, up x)); gate and up are column-parallel, down row-parallel. [T_local, d] -> [T_local, d]."""

    def __init__(self, ctx: ModelContext, hidden: int) -> None:
        super().__init__()
        self.ctx = ctx
        width = ctx.model.hidden_size
        self.gate_proj = ctx.backend.column(ctx, width, hidden)
        self.up_proj = ctx.backend.column(ctx, width, hidden)
        self.down_proj = ctx.backend.row(ctx, hidden, width)

    def forward(self, x: torch.Tensor, *, entered: torch.Tensor | None = None) -> torch.Tensor:
        """`entered` is x already inside the tensor-parallel region, when the caller has it."""
        return self.begin(x, entered=entered)()

    def begin(self, x: torch.Tensor, *, entered: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
        """Everything in front of the down projection; what is returned does that, called once."""
        x = self.ctx.layout.enter_tensor_parallel(x) if entered is None else entered
        activate = partial(gated_activation, self.ctx.model)
        return consumed_later(
            self.ctx, "units", activate, self.gate_proj(x), self.up_proj(x), by=self.down_proj, fused=x.is_cuda
        )
