"""Run a model against a cache: the same modules and depth mixes as training, with cached sequence mixing.

`forward` takes any number of new tokens of each sequence, so prefill in chunks and decoding are one path. With one
new token a sequence KDA steps its state in place and MLA attends in the absorbed form, where queries go to the latent
space and no key or value is ever expanded. `step` is that case alone; on a GPU it never waits for the device, and from
its third call on replays a captured graph, since a decode step is a thousand small kernels.
"""

from __future__ import annotations

import torch
from torch import nn

from k3kernels.conv import short_convolution
from k3kernels.conv.step import short_convolution_step_qkv
from k3kernels.gated_mla import sigmoid_gate
from k3kernels.kda import kda
from k3kernels.kda.recurrent import kda_decode
from k3kernels.latent_attention import latent_attention
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
        self.graphs = model.ctx.device.type == "cuda" and model.ctx.dtype == torch.bfloat16
        """Whether `step` captures itself: fp32 experts are multiplied one by one, by counts that the host reads."""
        self._captured: _Captured | None = None

    @torch.no_grad()
    def forward(self, tokens: list[torch.Tensor], cache: Cache, *, logits_of: str = "last") -> torch.Tensor:
        """Advance each sequence b by tokens[b], int64 [n_b] (n_b may be 0), and update the cache.

        logits_of: "last" -> [B, V], of the last new token of each sequence; "all" -> [sum n_b, V].
        Raises ConfigError when a sequence would outgrow the cache.
        """
        counts = [int(t.numel()) for t in tokens]
        cache.room_for(counts)
        flat = torch.cat(tokens)
        return self._advance(flat, cache, Step(cache, counts, flat.device), last=logits_of == "last")

    @torch.no_grad()
    def step(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        """One token of every sequence, int64 [B] on the model's device -> logits fp32 [B, V], which the next call may
        overwrite. Raises ConfigError when a sequence would outgrow the cache."""
        ones = [1] * cache.batch
        cache.room_for(ones)
        if not self.graphs:
            return self._advance(tokens, cache, Step(cache, ones, tokens.device))
        if self._captured is None or self._captured.cache is not cache:
            self._captured = None  # frees the memory of the one before
            self._captured = _Captured(self, cache)
        return self._captured(tokens)

    def forget(self) -> None:
        """Drop the captured graph and with it the cache it was captured on."""
        self._captured = None

    def _advance(self, flat: torch.Tensor, cache: Cache, step: Step, last: bool = True) -> torch.Tensor:
        logits = self.compute(flat, step, last)
        cache.note(step.sizes)
        return logits

    def compute(self, flat: torch.Tensor, step: Step, last: bool = True) -> torch.Tensor:
        """The device's part of a forward. Nothing here waits for the device when every sequence has one token."""
        stream = PackedStream(step.cu_seqlens, flat.numel(), attend=step.attend)
        step.attended = step.cache.lengths + 1
        state = self.model.run_layers(DepthState(partial=self.model.embedding(flat)), stream)
        if last and not step.one_each:
            ends = step.cu_seqlens[1:].long() - 1
            *bank, partial = (v[ends] for v in state.sources())
            state = DepthState(bank, partial)
        step.cache.lengths += step.counts
        return self.model.lm_head(self.model.normed_output(state)).float()


PLAIN_STEPS = 2  # before a capture: kernels compile, libraries set up


class _Captured:
    """`Decoder.step` on one cache: two plain steps, in which kernels compile and libraries set up, then a graph."""

    def __init__(self, decoder: Decoder, cache: Cache) -> None:
        self.decoder, self.cache, self.calls = decoder, cache, 0
        self.tokens = torch.zeros(cache.batch, dtype=torch.int64, device=cache.lengths.device)
        self.step = Step(cache, [1] * cache.batch, cache.lengths.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.empty(0)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.tokens.copy_(tokens)
        self.calls += 1
        if self.calls <= PLAIN_STEPS:
            side = torch.cuda.Stream()  # as libraries must be set up for a capture
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                logits = self.decoder.compute(self.tokens, self.step)
            torch.cuda.current_stream().wait_stream(side)
        else:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self.logits = self.decoder.compute(self.tokens, self.step)
            self.graph.replay()
            logits = self.logits
        self.cache.note(self.step.sizes)
        return logits


class Step:
    """One forward: where each sequence's new tokens lie, and the cached form of both mixers."""

    def __init__(self, cache: Cache, counts: list[int], device: torch.device) -> None:
        self.cache, self.one_each = cache, all(n == 1 for n in counts)
        self.sizes = counts
        self.counts = torch.tensor(counts, device=device)
        bounds = [0]
        for n in counts:
            bounds.append(bounds[-1] + n)
        self.cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
        self.rows = torch.arange(len(counts), device=device)
        self.attended = self.rows  # of each sequence, the new token included; set by every forward

    def attend(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if isinstance(module, KDA):
            return self.attend_kda(module, x)
        if isinstance(module, GatedMLA):
            return self.attend_mla(module, x)
        raise ConfigError(f"no cached form of {type(module).__name__}; generate with model.mixer=kda")

    def attend_kda(self, layer: KDA, x: torch.Tensor) -> torch.Tensor:
        """KDA over this step's rows x [rows, d] -> [rows, d]; the cached fp32 states and convolution tails move on."""
        kept = self.cache.layers[layer.layer]
        assert isinstance(kept, KDACache)
        joined = getattr(layer, "joined", None) if self.one_each else None
        if joined is None:
            q, k, v, gate, beta, z = layer.project(x)
        else:
            q, k, v, gate, decay, beta = joined(x)
            z = layer.f_b_proj(decay)
            if layer.ctx.model.kda.output_gate != "full":
                gate = layer.g_b_proj(gate)
        weights = (layer.q_conv, layer.k_conv, layer.v_conv)
        bound = layer.ctx.model.kda.decay_bound

        def heads(t: torch.Tensor, batch: int) -> torch.Tensor:
            return t.reshape(batch, -1, layer.heads, layer.head_dim)

        if self.one_each:
            batch = self.cache.batch
            mixed = short_convolution_step_qkv((q, k, v), weights, (kept.q, kept.k, kept.v))
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
                getattr(kept, name).copy_(tail)
                mixed.append(y)
            q, k, v = (heads(t, 1) for t in mixed)
            out, state = kda(
                q, k, v, heads(z, 1), beta[None], layer.A_log, layer.dt_bias, bound=bound,
                initial_state=kept.state, cu_seqlens=self.cu_seqlens, output_final_state=True,
            )  # fmt: skip
            kept.state.copy_(state)
        out = out.reshape(-1, layer.heads, layer.head_dim)
        gate = gate.view(-1, layer.heads, layer.head_dim)
        out = gated_rms_norm(out, gate, layer.o_norm, eps=layer.ctx.model.norm_eps)
        return layer.o_proj(out.reshape(x.shape[0], -1))

    def attend_mla(self, layer: GatedMLA, x: torch.Tensor) -> torch.Tensor:
        """Gated MLA of rows x [rows, d] over the cached latents, which these rows' own join first -> [rows, d]."""
        kept = self.cache.layers[layer.layer]
        assert isinstance(kept, LatentCache)
        joined = getattr(layer, "joined", None) if self.one_each else None
        if joined is None:
            q, latent, gate = layer.project(x)
        else:
            low, kv, *gates = joined(x)
            q, latent, gate = layer.queries(low), layer.latent(kv), gates[0] if gates else None
        out = self._absorbed(layer, kept, q, latent) if self.one_each else self._expanded(layer, kept, q, latent)
        out = out.reshape(x.shape[0], -1)
        if gate is not None:
            out = sigmoid_gate(out, gate)
        return layer.o_proj(out.to(x.dtype))

    def _expanded(self, layer: GatedMLA, kept: LatentCache, q: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """Sequence by sequence: keys and values of the whole past, causal. q [T, H, K] -> [T, H, V]."""
        outs = []
        for b, (q_b, latent_b) in enumerate(zip(q.split(self.sizes), latent.split(self.sizes))):
            past = self.cache.seen[b]
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
        mla = layer.ctx.model.mla
        kept.latents[self.rows, self.cache.lengths] = latent
        weight = layer.kv_b_proj.weight.view(layer.heads, mla.nope_dim + mla.v_dim, mla.kv_lora_rank)
        w_k, w_v = weight.split([mla.nope_dim, mla.v_dim], dim=1)
        q_nope, q_shared = q.split([mla.nope_dim, mla.shared_dim], dim=-1)
        absorbed = torch.cat([torch.einsum("bhn,hnc->bhc", q_nope, w_k), q_shared], dim=-1)
        mixed = latent_attention(absorbed, kept.latents, self.attended, values=mla.kv_lora_rank, scale=layer.scale)
        return torch.einsum("bhc,hvc->bhv", mixed, w_v)
