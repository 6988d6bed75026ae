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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.begin(x)()

    def begin(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Everything in front of the down projection; what is returned does that, called once."""
        entered = self.ctx.layout.enter_tensor_parallel(x)
        return self.activated(*self.ctx.backend.products([(self.gate_proj, entered), (self.up_proj, entered)]))

    def activated(self, gate: torch.Tensor, up: torch.Tensor) -> Callable[[], torch.Tensor]:
        """`begin` behind its products gate and up [T, hidden / TP]."""
        activate = partial(gated_activation, self.ctx.model)
        return consumed_later(self.ctx, "units", activate, gate, up, by=self.down_proj, fused=gate.is_cuda)
