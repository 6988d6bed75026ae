"""Kimi Delta Attention as a layer (report sections 2.1.1 and 2.3; spec section 2).

Projections, short convolutions, the recurrence of `k3kernels.kda`, and the normed, gated output. The first dimension
of every head-wise parameter is cut over tensor-parallel ranks; the output norm is one vector for all heads.
"""

from __future__ import annotations

import torch
from torch import nn

from k3kernels.conv import short_convolution_qkv
from k3kernels.kda import kda
from k3kernels.norm import gated_rms_norm
from k3train.model.context import ModelContext, PackedStream
from k3train.model.parameters import ParameterSpec, new_parameter, split_by_heads
from k3train.model.recompute import consumed
from k3train.parallel import context as context_parallel


class KDA(nn.Module):
    """[T_local, d] -> [T_local, d]; heads are split over tensor-parallel ranks."""

    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__()
        self.ctx, self.layer = ctx, layer
        model, conf, backend = ctx.model, ctx.model.kda, ctx.backend
        width, inner = model.hidden_size, conf.heads * conf.head_dim
        self.heads, self.head_dim = conf.heads // ctx.layout.sizes.tensor, conf.head_dim
        self.q_proj = backend.column(ctx, width, inner)
        self.k_proj = backend.column(ctx, width, inner)
        self.v_proj = backend.column(ctx, width, inner)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            split_by_heads(projection, conf.head_dim)
        self.f_a_proj = backend.replicated(ctx, width, conf.head_dim)
        self.f_b_proj = backend.column(ctx, conf.head_dim, inner)
        self.b_proj = backend.column(ctx, width, conf.heads)
        if conf.output_gate == "full":
            self.g_proj = backend.column(ctx, width, inner)
        else:
            self.g_a_proj = backend.replicated(ctx, width, conf.head_dim)
            self.g_b_proj = backend.column(ctx, conf.head_dim, inner)
        self.o_proj = backend.row(ctx, inner, width)

        def fp32(*shape: int, init: str, axis: int | None = 0, partial: bool = False) -> nn.Parameter:
            spec = ParameterSpec(shape, tensor_axis=axis, init=init)
            return new_parameter(spec, ctx.layout, torch.float32, sum_over_tensor=partial)

        self.q_conv = fp32(inner, conf.conv_size, init="conv")
        self.k_conv = fp32(inner, conf.conv_size, init="conv")
        self.v_conv = fp32(inner, conf.conv_size, init="conv")
        # zero with the bound on (report section 2.1.1); the softplus gate starts there too, at e^0 = 1
        self.A_log = fp32(conf.heads, init="zeros")
        self.dt_bias = fp32(conf.heads, conf.head_dim, init="dt_bias")
        # each rank sees only its own heads, so the shared vector's gradient is partial on every tensor rank
        self.o_norm = fp32(conf.head_dim, init="ones", axis=None, partial=True)

    def project(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x [T_local, d] -> q, k, v and the output gate [T, H * K], beta's logits [T, H] and the raw decay z [T, H * K], of
        this rank's heads."""
        enter, full = self.ctx.layout.enter_tensor_parallel, self.ctx.model.kda.output_gate == "full"
        entered = enter(x)
        gate = (self.g_proj, entered) if full else (self.g_a_proj, x)
        asked = [(projection, entered) for projection in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v, g, beta, f = self.ctx.backend.products([*asked, gate, (self.b_proj, entered), (self.f_a_proj, x)])
        return [q, k, v, g if full else self.g_b_proj(enter(g)), beta, self.f_b_proj(enter(f))]

    def forward(self, x: torch.Tensor, stream: PackedStream) -> torch.Tensor:
        q, k, v, gate, beta, z = self.project(x)
        if self.ctx.layout.sizes.context > 1:
            out = context_parallel.kda_attention(self, q, k, v, z, beta, stream)
        else:
            cu = stream.cu_seqlens
            weights = (self.q_conv, self.k_conv, self.v_conv)
            q, k, v, _ = short_convolution_qkv(q[None], k[None], v[None], *weights, cu_seqlens=cu)
            out, state = self.recurrence(q, k, v, z, beta, cu_seqlens=cu)
            if state is not None:
                self.ctx.record(f"kda_state.{self.layer}", state)
        if self.ctx.probe is not None:
            self.ctx.record(f"log_decay.{self.layer}", self.log_decay(z))
        gate = gate.view(-1, self.heads, self.head_dim)
        return consumed(
            self.ctx, "gates", self.normed, out, gate, by=lambda o: self.o_proj(o.reshape(o.shape[0], -1)),
            fused=out.is_cuda,
        )  # fmt: skip

    def normed(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(out, gate, self.o_norm, eps=self.ctx.model.norm_eps)

    def recurrence(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, *,
        cu_seqlens: torch.Tensor, initial_state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Convolved q, k, v and raw gates [1|-, T, H * K] -> o [T, H, V] and, when probed, states [N, H, K, V]."""

        def heads(t: torch.Tensor) -> torch.Tensor:
            return t.view(1, -1, self.heads, self.head_dim)

        out, state = kda(
            heads(q), heads(k), heads(v), heads(z), beta.view(1, -1, self.heads), self.A_log, self.dt_bias,
            bound=self.ctx.model.kda.decay_bound, cu_seqlens=cu_seqlens, initial_state=initial_state,
            output_final_state=self.ctx.probe is not None,
        )  # fmt: skip
        return out.squeeze(0), state  # not out[0], whose gradient is copied into one of zeros

    @torch.no_grad()
    def log_decay(self, z: torch.Tensor) -> torch.Tensor:
        """log alpha [T, H, K] in fp32 (spec 2.2 step 6), for statistics."""
        x = z.view(-1, self.heads, self.head_dim).float() + self.dt_bias
        rate = self.A_log.exp()[:, None]
        bound = self.ctx.model.kda.decay_bound
        if bound is None:
            return -rate * torch.nn.functional.softplus(x)
        return bound * torch.sigmoid(rate * x)
