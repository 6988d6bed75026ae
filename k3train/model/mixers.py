"""The ladder of sequence mixers that can stand in a K layer: softmax, linear, delta rule, gated delta rule, KDA.

All share KDA's q, k, v, output-gate and output projections, its short convolutions and its output norm, so that arms of
a comparison differ in the recurrence and in what drives it (beta from the delta rule up, one decay a head for the gated
delta rule, one a channel for KDA).
"""

from __future__ import annotations

import torch
from torch import nn

from k3kernels.conv import short_convolution_qkv
from k3kernels.delta_rule import delta_rule
from k3kernels.gated_delta import gated_delta
from k3kernels.linear_attention import linear_attention
from k3kernels.norm import gated_rms_norm
from k3train.model.context import ModelContext, PackedStream
from k3train.model.kda import KDA
from k3train.model.parameters import ParameterSpec, new_parameter, split_by_heads


class LadderMixer(nn.Module):
    """[T_local, d] -> [T_local, d] by `kind`: softmax | linear | delta | gated_delta. Heads are split over ranks.

    softmax is multi-head attention without positions on the convolved q, k, v, scaled by head_dim^-0.5.
    """

    def __init__(self, ctx: ModelContext, layer: int, kind: str) -> None:
        super().__init__()
        self.ctx, self.layer, self.kind = ctx, layer, kind
        conf, backend, width = ctx.model.kda, ctx.backend, ctx.model.hidden_size
        inner = conf.heads * conf.head_dim
        self.heads, self.head_dim = conf.heads // ctx.layout.sizes.tensor, conf.head_dim
        self.q_proj = backend.column(ctx, width, inner)
        self.k_proj = backend.column(ctx, width, inner)
        self.v_proj = backend.column(ctx, width, inner)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            split_by_heads(projection, conf.head_dim)
        self.g_proj = backend.column(ctx, width, inner)
        self.o_proj = backend.row(ctx, inner, width)

        def fp32(*shape: int, init: str, axis: int | None = 0, partial: bool = False) -> nn.Parameter:
            spec = ParameterSpec(shape, tensor_axis=axis, init=init)
            return new_parameter(spec, ctx.layout, torch.float32, sum_over_tensor=partial)

        self.q_conv = fp32(inner, conf.conv_size, init="conv")
        self.k_conv = fp32(inner, conf.conv_size, init="conv")
        self.v_conv = fp32(inner, conf.conv_size, init="conv")
        self.o_norm = fp32(conf.head_dim, init="ones", axis=None, partial=True)
        if kind in ("delta", "gated_delta"):
            self.b_proj = backend.column(ctx, width, conf.heads)
        if kind == "gated_delta":
            self.a_proj = backend.column(ctx, width, conf.heads)
            self.A_log = fp32(conf.heads, init="zeros")
            self.dt_bias = fp32(conf.heads, init="dt_bias")

    def forward(self, x: torch.Tensor, stream: PackedStream) -> torch.Tensor:
        entered = self.ctx.layout.enter_tensor_parallel(x)
        projected = (proj(entered)[None] for proj in (self.q_proj, self.k_proj, self.v_proj))
        weights = (self.q_conv, self.k_conv, self.v_conv)
        *convolved, _ = short_convolution_qkv(*projected, *weights, cu_seqlens=stream.cu_seqlens)
        q, k, v = (t.view(1, -1, self.heads, self.head_dim) for t in convolved)
        out = self.mix(q, k, v, entered, stream)
        gate = self.g_proj(entered).view(-1, self.heads, self.head_dim)
        out = gated_rms_norm(out, gate, self.o_norm, eps=self.ctx.model.norm_eps)
        return self.o_proj(out.reshape(out.shape[0], -1))

    def mix(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, entered: torch.Tensor, stream: PackedStream
    ) -> torch.Tensor:
        """q, k, v [1, T, H, K] -> [T, H, K]."""
        cu = stream.cu_seqlens
        if self.kind == "softmax":
            return self.ctx.backend.attention(q[0], k[0], v[0], stream, self.head_dim**-0.5)
        if self.kind == "linear":
            return linear_attention(q, k, v, cu_seqlens=cu)[0][0]
        beta = self.b_proj(entered)[None]
        if self.kind == "delta":
            return delta_rule(q, k, v, beta, cu_seqlens=cu)[0][0]
        z = self.a_proj(entered)[None]
        bound = self.ctx.model.kda.decay_bound
        return gated_delta(q, k, v, z, beta, self.A_log, self.dt_bias, bound=bound, cu_seqlens=cu)[0][0]


def make_mixer(ctx: ModelContext, layer: int) -> nn.Module:
    """The module of a K layer for `model.mixer`."""
    if ctx.model.mixer == "kda":
        return KDA(ctx, layer)
    return LadderMixer(ctx, layer, ctx.model.mixer)
