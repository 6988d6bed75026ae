"""Run a model against a cache: the same modules and depth mixes as training, with cached sequence mixing.

`forward` takes any number of new tokens of each sequence, so prefill in chunks and decoding are one path. With one
new token a sequence KDA steps its state in place and MLA attends in the absorbed form, where queries go to the latent
space and no key or value is ever expanded.
"""

from __future__ import annotations

import torch
from torch import nn

from k3kernels.conv import short_convolution, short_convolution_step
from k3kernels.kda import kda
from k3kernels.kda.recurrent import kda_decode
from k3kernels.norm import gated_rms_norm
from k3train.errors import ConfigError
from k3train.inference.cache import Cache, KDACache, LatentCache
from k3train.model.attention_residuals import DepthState
from k3train.model.context import PackedStream
from k3train.model.gated_mla import GatedMLA
from k3train.model.k3 import K3Model
from k3train.model.kda import KDA


class Decoder:
    """A whole model (one pipeline stage, no tensor or context parallelism) and how it meets a cache."""

    def __init__(self, model: K3Model) -> None:
        sizes = model.ctx.layout.sizes
        if not (model.pre_process and model.post_process) or sizes.tensor > 1 or sizes.context > 1:
            raise ConfigError(
                f"decoding runs on one stage without tensor or context parallelism, not on {sizes.describe()}; "
                "export the run first, or set parallel.tensor=1 parallel.pipeline=1 parallel.context=1"
            )
        self.model = model.eval()

    @torch.no_grad()
    def forward(self, tokens: list[torch.Tensor], cache: Cache, *, logits_of: str = "last") -> torch.Tensor:
        """Advance each sequence b by tokens[b], int64 [n_b] (n_b may be 0), and update the cache.

        logits_of: "last" -> [B, V], of the last new token of each sequence; "all" -> [sum n_b, V].
        Raises ConfigError when a sequence would outgrow the cache.
        """
        counts = [int(t.numel()) for t in tokens]
        longest = int((cache.lengths + torch.tensor(counts, device=cache.lengths.device)).max())
        if longest > cache.capacity:
            raise ConfigError(f"{longest} tokens do not fit the cache of {cache.capacity}; make it larger")
        step = _Step(self.model, cache, counts)
        flat = torch.cat(tokens)
        stream = PackedStream(step.cu_seqlens, flat.numel(), attend=step.attend)
        state = self.model.run_layers(DepthState(partial=self.model.embedding(flat)), stream)
        hidden = self.model.read_out(state)
        if logits_of == "last":
            hidden = hidden[step.cu_seqlens[1:].long() - 1]
        cache.lengths += step.counts
        return self.model.lm_head(self.model.final_norm(hidden)).float()


class _Step:
    """One forward: where each sequence's new tokens lie, and the cached form of both mixers."""

    def __init__(self, model: K3Model, cache: Cache, counts: list[int]) -> None:
        device = cache.lengths.device
        self.cache, self.one_each = cache, all(n == 1 for n in counts)
        self.sizes = counts
        self.counts = torch.tensor(counts, device=device)
        bounds = [0]
        for n in counts:
            bounds.append(bounds[-1] + n)
        self.cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)

    def attend(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if isinstance(module, KDA):
            return self.attend_kda(module, x)
        if isinstance(module, GatedMLA):
            return self.attend_mla(module, x)
        raise ConfigError(f"no cached form of {type(module).__name__}; generate with model.mixer=kda")

    def attend_kda(self, layer: KDA, x: torch.Tensor) -> torch.Tensor:
        kept = self.cache.layers[layer.layer]
        assert isinstance(kept, KDACache)
        q, k, v, z, beta = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x), layer.gate_input(x), layer.b_proj(x)
        weights = (layer.q_conv, layer.k_conv, layer.v_conv)
        bound = layer.ctx.model.kda.decay_bound

        def heads(t: torch.Tensor, batch: int) -> torch.Tensor:
            return t.reshape(batch, -1, layer.heads, layer.head_dim)

        if self.one_each:
            batch = self.cache.batch
            mixed = [
                short_convolution_step(t.view(batch, 1, -1), w, tail)
                for t, w, tail in zip((q, k, v), weights, (kept.q, kept.k, kept.v))
            ]
            q, k, v = (heads(t, batch) for t in mixed)
            out = kda_decode(
                q, k, v, heads(z, batch), beta.view(batch, 1, -1), layer.A_log, layer.dt_bias, kept.state, bound=bound
            )
        else:
            mixed = []
            for t, w, name in zip((q, k, v), weights, "qkv"):
                y, tail = short_convolution(
                    t[None], w, cu_seqlens=self.cu_seqlens, initial_state=getattr(kept, name), output_final_state=True
                )
                setattr(kept, name, tail.to(t.dtype))
                mixed.append(y)
            q, k, v = (heads(t, 1) for t in mixed)
            out, state = kda(
                q, k, v, heads(z, 1), beta[None], layer.A_log, layer.dt_bias, bound=bound,
                initial_state=kept.state, cu_seqlens=self.cu_seqlens, output_final_state=True,
            )  # fmt: skip
            kept.state.copy_(state)
        out = out.reshape(-1, layer.heads, layer.head_dim)
        gate = layer.output_gate(x, x).view(-1, layer.heads, layer.head_dim)
        out = gated_rms_norm(out, gate, layer.o_norm, eps=layer.ctx.model.norm_eps)
        return layer.o_proj(out.reshape(x.shape[0], -1))

    def attend_mla(self, layer: GatedMLA, x: torch.Tensor) -> torch.Tensor:
        kept = self.cache.layers[layer.layer]
        assert isinstance(kept, LatentCache)
        q, latent = layer.queries(x, x), layer.latent(x)
        out = self._absorbed(layer, kept, q, latent) if self.one_each else self._expanded(layer, kept, q, latent)
        out = out.reshape(x.shape[0], -1)
        if layer.ctx.model.mla.output_gate:
            out = out * torch.sigmoid(layer.g_proj(x))
        return layer.o_proj(out.to(x.dtype))

    def _expanded(self, layer: GatedMLA, kept: LatentCache, q: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """Sequence by sequence: keys and values of the whole past, causal. q [T, H, K] -> [T, H, V]."""
        outs = []
        for b, (q_b, latent_b) in enumerate(zip(q.split(self.sizes), latent.split(self.sizes))):
            past = int(self.cache.lengths[b])
            end = past + q_b.shape[0]
            kept.latents[b, past:end] = latent_b
            k, v = layer.expand(kept.latents[b, :end])
            rows = torch.arange(past, end, device=q.device)[:, None]
            mask = rows >= torch.arange(end, device=q.device)
            o = nn.functional.scaled_dot_product_attention(
                q_b.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, scale=layer.scale
            )
            outs.append(o.transpose(0, 1))
        return torch.cat(outs)

    def _absorbed(self, layer: GatedMLA, kept: LatentCache, q: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """One query a sequence against the latents themselves. q [B, H, K] -> [B, H, V].

        With W_k, W_v the key and value rows of kv_b_proj: q . (W_k c) = (W_k^T q) . c, sum p (W_v c) = W_v (sum p c).
        """
        mla, batch = layer.ctx.model.mla, self.cache.batch
        kept.latents[torch.arange(batch, device=q.device), self.cache.lengths] = latent
        longest = int(self.cache.lengths.max()) + 1
        past = kept.latents[:, :longest]
        weight = layer.kv_b_proj.weight.view(layer.heads, mla.nope_dim + mla.v_dim, mla.kv_lora_rank)
        w_k, w_v = weight.split([mla.nope_dim, mla.v_dim], dim=1)
        q_nope, q_shared = q.split([mla.nope_dim, mla.shared_dim], dim=-1)
        absorbed = torch.cat([torch.einsum("bhn,hnc->bhc", q_nope, w_k), q_shared], dim=-1)
        scores = torch.matmul(absorbed, past.transpose(1, 2)).float() * layer.scale  # [B, H, S]
        beyond = torch.arange(longest, device=q.device) > self.cache.lengths[:, None]
        p = torch.softmax(scores.masked_fill(beyond[:, None], float("-inf")), dim=-1).to(past.dtype)
        mixed = torch.matmul(p, past[..., : mla.kv_lora_rank])  # [B, H, C]
        return torch.einsum("bhc,hvc->bhv", mixed, w_v)
