"""One transformer layer: two sublayers, each reading a mix over depth and adding its output to the running block."""

from __future__ import annotations

import torch
from torch import nn

from k3train.model.attention_residuals import DepthAttention, DepthState
from k3train.model.context import ModelContext, PackedStream
from k3train.model.gated_mla import GatedMLA
from k3train.model.latent_moe import LatentMoE
from k3train.model.mixers import make_mixer
from k3train.model.mlp import GatedMLP
from k3train.model.recompute import elementwise


class K3Layer(nn.Module):
    """Layer `index` (0-based, global) of kind K (linear mixer) or F (full attention)."""

    def __init__(self, ctx: ModelContext, index: int, kind: str) -> None:
        super().__init__()
        model = ctx.model
        self.ctx, self.index, self.kind = ctx, index, kind
        self.input_norm = ctx.backend.norm(ctx, model.hidden_size, eps=model.norm_eps)
        self.post_attention_norm = ctx.backend.norm(ctx, model.hidden_size, eps=model.norm_eps)
        if model.attention_residuals != "off":
            self.attention_residual = DepthAttention(ctx, f"attention.{index}", acting=index > 0)
            self.mlp_residual = DepthAttention(ctx, f"mlp.{index}")
        self.attention: nn.Module = GatedMLA(ctx, index) if kind == "F" else make_mixer(ctx, index)
        if index < model.dense_layers:
            self.mlp = GatedMLP(ctx, model.dense_hidden)
        else:
            self.moe = LatentMoE(ctx, index)

    def forward(self, state: DepthState, stream: PackedStream) -> DepthState:
        """Spec 4.2: mix, close the block when one begins here, attend, mix, feed forward."""
        mode = self.ctx.model.attention_residuals
        x = self.read(state, "attention_residual", self.input_norm)
        if mode == "full" or (mode == "block" and self.index % self.ctx.model.residual_block == 0):
            state.close_block()
        state.add(self.attend(x, stream))
        x = self.read(state, "mlp_residual", self.post_attention_norm)
        if mode == "full":
            state.close_block()
        state.add(self.feed_forward(x, stream))
        assert state.partial is not None
        self.ctx.record(f"hidden.{self.index}", state.partial)
        return state

    def read(self, state: DepthState, mix: str, norm: nn.Module) -> torch.Tensor:
        """What a sublayer sees: the normed mix over depth, or the normed residual stream without mixes."""

        def normed(*sources: torch.Tensor) -> torch.Tensor:
            off = self.ctx.model.attention_residuals == "off"
            return norm(sources[-1] if off else getattr(self, mix)(DepthState(list(sources))))

        return elementwise(self.ctx, normed, *state.sources())

    def attend(self, x: torch.Tensor, stream: PackedStream) -> torch.Tensor:
        return self.attention(x, stream) if stream.attend is None else stream.attend(self.attention, x)

    def feed_forward(self, x: torch.Tensor, stream: PackedStream) -> torch.Tensor:
        return self.mlp(x) if self.index < self.ctx.model.dense_layers else self.moe(x, stream)
