"""Gated multi-head latent attention without positions (report equation 7; spec section 3).

Queries come from a low-rank latent; keys and values from a normed latent of kv_lora_rank channels plus one slice of
shared_dim key channels that all heads share, neither rotated nor normed. The heads' output is gated by sigmoid(W_g x).
"""

from __future__ import annotations

import torch
from torch import nn

from k3kernels.gated_mla import assemble_keys, sigmoid_gate
from k3train.model.attention_logits import largest_logits
from k3train.model.context import ModelContext, PackedStream
from k3train.model.parameters import split_by_heads
from k3train.model.recompute import consumed, elementwise
from k3train.parallel import context as context_parallel


class GatedMLA(nn.Module):
    """[T_local, d] -> [T_local, d]; heads are split over tensor-parallel ranks.

    max_logit: fp32 [H_local], the largest logit of each head in training since the last step; None where nobody asks.
    """

    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__()
        self.ctx, self.layer = ctx, layer
        model, mla, backend = ctx.model, ctx.model.mla, ctx.backend
        width, self.key_dim = model.hidden_size, mla.nope_dim + mla.shared_dim
        self.heads = mla.heads // ctx.layout.sizes.tensor
        if mla.q_lora_rank is None:
            self.q_proj = backend.column(ctx, width, mla.heads * self.key_dim)
            split_by_heads(self.q_proj, self.key_dim)
        else:
            self.q_a_proj = backend.replicated(ctx, width, mla.q_lora_rank)
            self.q_a_norm = backend.norm(ctx, mla.q_lora_rank, eps=mla.latent_eps)
            self.q_b_proj = backend.column(ctx, mla.q_lora_rank, mla.heads * self.key_dim)
            split_by_heads(self.q_b_proj, self.key_dim)
        self.kv_a_proj = backend.replicated(ctx, width, mla.kv_lora_rank + mla.shared_dim)
        self.kv_a_norm = backend.norm(ctx, mla.kv_lora_rank, eps=mla.latent_eps)
        self.kv_b_proj = backend.column(ctx, mla.kv_lora_rank, mla.heads * (mla.nope_dim + mla.v_dim))
        split_by_heads(self.kv_b_proj, mla.nope_dim, mla.v_dim)
        if mla.output_gate:
            self.g_proj = backend.column(ctx, width, mla.heads * mla.v_dim)
        self.o_proj = backend.row(ctx, mla.heads * mla.v_dim, width)
        self.scale = self.key_dim**-0.5
        self.max_logit: torch.Tensor | None = None

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """x [T_local, d] -> queries [T, H, key_dim], latents [T_local, kv_lora_rank + shared_dim] (what a cache keeps and context
        parallelism moves) and the output gate's logits [T, H * v_dim], of this rank's heads."""
        mla, entered = self.ctx.model.mla, self.ctx.layout.enter_tensor_parallel(x)
        query = (self.q_proj, entered) if mla.q_lora_rank is None else (self.q_a_proj, x)
        gate = [(self.g_proj, entered)] if mla.output_gate else []
        q, kv, *g = self.ctx.backend.products([query, (self.kv_a_proj, x), *gate])
        return self.queries(q), self.latent(kv), g[0] if g else None

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """What q_proj gave, or q_a_proj [T_local, q_lora_rank] -> [T, H, key_dim]."""
        if self.ctx.model.mla.q_lora_rank is not None:
            normed = elementwise(self.ctx, "norms", self.q_a_norm, q)
            q = self.q_b_proj(self.ctx.layout.enter_tensor_parallel(normed))
        return q.view(-1, self.heads, self.key_dim)

    def latent(self, kv: torch.Tensor) -> torch.Tensor:
        """What kv_a_proj gave -> the same with its kv_lora_rank channels normed."""
        mla = self.ctx.model.mla
        c, shared = kv.split([mla.kv_lora_rank, mla.shared_dim], dim=-1)
        return torch.cat([elementwise(self.ctx, "norms", self.kv_a_norm, c), shared], dim=-1)

    def expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [S, kv_lora_rank + shared_dim] -> keys [S, H, key_dim], values [S, H, v_dim] of this rank's heads."""
        mla = self.ctx.model.mla
        c, shared = latent.split([mla.kv_lora_rank, mla.shared_dim], dim=-1)
        kv = self.kv_b_proj(c).view(-1, self.heads, mla.nope_dim + mla.v_dim)
        return assemble_keys(kv, shared, mla.nope_dim)

    def watch(self, q: torch.Tensor, k: torch.Tensor, documents: torch.Tensor | None = None) -> None:
        """Note down the largest logits of queries q [n, H, K] that are the last n positions of keys k [m, H, K]."""
        assert self.max_logit is not None
        # in place: a captured graph adds to the same numbers each time
        torch.maximum(self.max_logit, largest_logits(q, k, self.scale, documents), out=self.max_logit)

    def watch_stream(self, q: torch.Tensor, k: torch.Tensor, stream: PackedStream) -> None:
        """`watch`, one sequence after another: q, k [T, H, K] of a whole stream."""
        length = stream.sequence_length or stream.total
        for rows in zip(q.split(length), k.split(length), stream.document_ids().split(length)):
            self.watch(*rows)

    def forward(self, x: torch.Tensor, stream: PackedStream) -> torch.Tensor:
        layout = self.ctx.layout
        watching = self.max_logit is not None and self.training and not self.ctx.recomputing
        q, latent, gate = self.project(x)
        latent = layout.enter_tensor_parallel(latent)
        if layout.sizes.context > 1:
            out = context_parallel.latent_attention(
                self.ctx, q, latent, self.expand, stream, self.scale, self.watch if watching else None,
                again=self.ctx.computed_again(self.layer),
            )  # fmt: skip
        else:
            k, v = self.expand(latent)
            if watching:
                self.watch_stream(q, k, stream)
            out = self.ctx.backend.attention(q, k, v, stream, self.scale)
        out = out.reshape(out.shape[0], -1)
        if gate is not None:
            return consumed(
                self.ctx, "gates", sigmoid_gate, out, gate, by=self.o_proj, fused=out.is_cuda,
                elsewhere=(out,),  # attention keeps its output
            )  # fmt: skip
        return self.o_proj(out.to(x.dtype))
