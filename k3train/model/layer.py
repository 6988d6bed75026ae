"""One transformer layer: two sublayers, each reading a mix over depth and adding its output to the running block."""

from __future__ import annotations

import torch
from torch import nn

from k3train.model import attention_residuals
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
        self.mixes: list[DepthAttention] = []
        """The mixes with the running sum from here to the end of the block, of this chunk's layers (`mixes_of_blocks`)."""
        self.attention: nn.Module = GatedMLA(ctx, index) if kind == "F" else make_mixer(ctx, index)
        if index < model.dense_layers:
            self.mlp = GatedMLP(ctx, model.dense_hidden)
        else:
            self.moe = LatentMoE(ctx, index)

    def forward(self, state: DepthState, stream: PackedStream) -> DepthState:
        """Spec 4.2: mix, close the block when one begins here, attend, mix, feed forward."""
        full = self.ctx.model.attention_residuals == "full"
        x = self.read(state, "attention_residual", self.input_norm, closes=self.begins_block)
        state.add(self.attend(x, stream))
        x = self.read(state, "mlp_residual", self.post_attention_norm, closes=full)
        state.add(self.feed_forward(x, stream))
        assert state.partial is not None
        self.ctx.record(f"hidden.{self.index}", state.partial)
        return state

    @property
    def begins_block(self) -> bool:
        """Whether the running sum in front of this layer is a finished source."""
        model = self.ctx.model
        return attention_residuals.source_ends_before(model.attention_residuals, self.index, model.residual_block)

    def read(self, state: DepthState, mix: str, norm: nn.Module, *, closes: bool) -> torch.Tensor:
        """What a sublayer sees: the normed mix over depth, or the normed residual stream without mixes.

        closes: the running sum is finished; it is the last of the sources either way.
        """
        off = self.ctx.model.attention_residuals == "off"
        if not off and attention_residuals.uses_kernels(state.sources()[-1]):
            if closes:
                state.close_block()
            return getattr(self, mix).read(state, norm, self.mixes)

        def normed(*sources: torch.Tensor) -> torch.Tensor:
            return norm(sources[-1] if off else getattr(self, mix)(DepthState(list(sources))))

        x = elementwise(self.ctx, "norms", normed, *state.sources())
        if closes:
            state.close_block()
        return x

    def attend(self, x: torch.Tensor, stream: PackedStream) -> torch.Tensor:
        return self.attention(x, stream) if stream.attend is None else stream.attend(self.attention, x)

    def feed_forward(self, x: torch.Tensor, stream: PackedStream) -> torch.Tensor:
        return self.mlp(x) if self.index < self.ctx.model.dense_layers else self.moe(x, stream)


def mixes_of_blocks(layers: list[K3Layer]) -> None:
    """Tell each of a chunk's layers which mixes of its block are still to come with a running sum, its own included."""
    for i, layer in enumerate(layers):
        if layer.ctx.model.attention_residuals != "block":
            continue
        first = layer.index // layer.ctx.model.residual_block
        layer.mixes = [] if layer.begins_block else [layer.attention_residual]
        layer.mixes.append(layer.mlp_residual)
        for later in layers[i + 1 :]:
            if later.index // layer.ctx.model.residual_block == first:
                layer.mixes += [later.attention_residual, later.mlp_residual]
