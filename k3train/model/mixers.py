"""The ladder of sequence mixers that can stand in a K layer: softmax, linear, delta rule, gated delta rule, KDA.

All share KDA's q, k, v, output-gate and output projections, its short convolutions and its output norm, so that arms of
a comparison differ in the recurrence and in what drives it (beta from the delta rule up, one decay a head for the gated
delta rule, one a channel for KDA).

Over context ranks the projected tokens of all heads are traded for the whole stream of some heads, and back: whatever a
mixer does to a stream, it does whole.
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
from k3train.parallel.exchange import heads_to_tokens, tokens_to_heads


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
        read = [self.q_proj, self.k_proj, self.v_proj, self.g_proj, *self.gate_projections()]
        q, k, v, gate, *gates = self.ctx.backend.products([(projection, entered) for projection in read])
        out = self.mix([q, k, v], gates, stream)
        gate = gate.view(-1, self.heads, self.head_dim)
        out = gated_rms_norm(out, gate, self.o_norm, eps=self.ctx.model.norm_eps)
        return self.o_proj(out.reshape(out.shape[0], -1))

    def mix(self, projected: list[torch.Tensor], gates: list[torch.Tensor], stream: PackedStream) -> torch.Tensor:
        """q, k, v [T_local, H * K] and gates [T_local, H] -> [T_local, H, K]."""
        group = self.ctx.layout.cp
        if group.size() == 1:
            return self.sequence(projected, gates, slice(None), stream)
        per_head = [x.unflatten(1, (self.heads, -1)) for x in (*projected, *gates)]
        whole = tokens_to_heads(torch.cat(per_head, dim=-1), group)
        *q_k_v, gates_of_mine = whole.split([self.head_dim] * 3 + [len(gates)], dim=-1)
        mine = slice(group.rank() * whole.shape[1], (group.rank() + 1) * whole.shape[1])
        flat, numbers = [x.flatten(1) for x in q_k_v], [x.contiguous() for x in gates_of_mine.unbind(-1)]
        return heads_to_tokens(self.sequence(flat, numbers, mine, stream), group)

    def gate_projections(self) -> list[nn.Module]:
        """What gives a number a head and token: beta, and the raw decay."""
        return [getattr(self, name) for name in ("b_proj", "a_proj") if hasattr(self, name)]

    def sequence(
        self, projected: list[torch.Tensor], gates: list[torch.Tensor], heads: slice, stream: PackedStream
    ) -> torch.Tensor:
        """Convolutions and recurrence over a whole stream: q, k, v [T, h * K] and gates [T, h] of `heads` of this tensor
        rank's -> [T, h, K]."""
        cu, width = stream.cu_seqlens, self.head_dim
        rows = slice(None) if heads.start is None else slice(heads.start * width, heads.stop * width)
        weights = (self.q_conv[rows], self.k_conv[rows], self.v_conv[rows])
        *convolved, _ = short_convolution_qkv(*(x[None] for x in projected), *weights, cu_seqlens=cu)
        q, k, v = (x.unflatten(-1, (-1, width)) for x in convolved)
        if self.kind == "softmax":
            return self.ctx.backend.attention(q[0], k[0], v[0], stream, width**-0.5)
        if self.kind == "linear":
            borders = cu if stream.bounds is None else torch.tensor(stream.bounds)  # the host plans its chunks
            return linear_attention(q, k, v, cu_seqlens=borders)[0][0]
        beta = gates[0][None]
        if self.kind == "delta":
            return delta_rule(q, k, v, beta, cu_seqlens=cu)[0][0]
        bound, A_log, dt_bias = self.ctx.model.kda.decay_bound, self.A_log[heads], self.dt_bias[heads]
        return gated_delta(q, k, v, gates[1][None], beta, A_log, dt_bias, bound=bound, cu_seqlens=cu)[0][0]


def make_mixer(ctx: ModelContext, layer: int) -> nn.Module:
    """The module of a K layer for `model.mixer`."""
    if ctx.model.mixer == "kda":
        return KDA(ctx, layer)
    return LadderMixer(ctx, layer, ctx.model.mixer)
