"""Bytes on the fullest rank of a layout: weights, gradients, optimizer state, activations in flight.

An estimate to choose layouts by, from shapes alone. Weights and their gradients are counted exactly for evenly split
layers. Activations count the tensors that backward keeps with the given recomputation, without allocator slack and
without the temporary buffers of kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from k3train.config import checks
from k3train.config.schema import Config, expand_pattern
from k3train.planning import parameters

GIB = float(1 << 30)
STATE_CHUNK = 64  # tokens between the recurrent states that backward keeps


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self))

    def by_part(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class RankParameters:
    """Parameters held by the fullest rank; shards: over how many ranks the optimizer state of each is split."""

    dense: float
    experts: float
    dense_shards: int
    expert_shards: int


def estimate(config: Config, world: int) -> Memory:
    """Memory of the fullest rank of `world` ranks in bf16 training (fp32 where train.precision says so)."""
    held = rank_parameters(config, world)
    number = 4 if config.train.precision == "fp32" else 2
    moments = 4.0 if config.optim.name == "muon" else 8.0  # one momentum for matrices, or two
    master = 0.0 if number == 4 else 4.0
    split = config.parallel.distributed_optimizer or (config.engine.name == "deepspeed")
    owned = held.dense / (held.dense_shards if split else 1) + held.experts / (held.expert_shards if split else 1)
    tokens = stream_tokens(config)
    return Memory(
        weights=number * (held.dense + held.experts),
        gradients=4.0 * (held.dense + held.experts),
        optimizer=(master + moments) * owned,
        activations=activations(config, number),
        logits=tokens * config.model.vocab_size / config.parallel.tensor * (number + 8.0),
    )


def rank_parameters(config: Config, world: int) -> RankParameters:
    """Parameters of the fullest rank: its share of the layers and the larger of embedding and head."""
    p, m = config.parallel, config.model
    parts = parameters.count(m)
    layers = len(expand_pattern(m.pattern, m.hybrid))
    stages = p.pipeline * p.virtual
    given = checks.stage_layers(config)
    counts = given or [math.ceil(layers / stages)] * stages
    share = max(sum(counts[v * p.pipeline + r] for v in range(p.virtual)) for r in range(p.pipeline)) / layers
    ends = parts.embedding + parts.head if p.pipeline == 1 else max(parts.embedding, parts.head)
    replicated = parts.routers + parts.latent + parts.attention_residuals + parts.norms
    split = parts.total - parts.embedding - parts.head - replicated - parts.routed_experts
    dense = ends / p.tensor + share * (split / p.tensor + replicated)
    return RankParameters(
        dense=dense,
        experts=share * parts.routed_experts / p.expert,
        dense_shards=world // (p.tensor * p.pipeline),
        expert_shards=max(1, world // (p.pipeline * p.expert)),
    )


def stream_tokens(config: Config) -> float:
    """Tokens of one micro-batch on one context rank."""
    return config.train.micro_batch * config.train.seq_length / config.parallel.context


def activations(config: Config, number: int = 2) -> float:
    """Bytes that backward keeps on the fullest pipeline rank, all micro-batches in flight."""
    m, p = config.model, config.parallel
    pattern = expand_pattern(m.pattern, m.hybrid)
    sparse = max(0, len(pattern) - m.dense_layers)
    tokens = stream_tokens(config)
    spread = p.tensor if checks.sequence_parallel(config) else 1
    d = m.hidden_size / spread
    mixers = pattern.count("K") * _linear_values(config) + pattern.count("F") * _attention_values(config)
    feed = sparse * _expert_values(config) + (len(pattern) - sparse) * (3 * m.dense_hidden / p.tensor + d)
    cheap = 1 if config.train.recompute == "selective" else 3  # norms and depth mixes: inputs alone, or outputs too
    kept = tokens * number * (mixers + feed + len(pattern) * 2 * cheap * d)
    kept += pattern.count("K") * tokens / STATE_CHUNK * m.kda.heads / p.tensor * m.kda.head_dim**2 * 4
    every, working = kept, 0.0
    if config.train.recompute in ("full", "unit"):
        every = len(pattern) * tokens * d * number  # layer inputs; the rest is computed again, a layer at a time
        working = kept / len(pattern)
    # 1F1B holds `pipeline` micro-batches of the first stage's layers; interleaving adds the warm-up of later chunks
    in_flight = p.pipeline if p.virtual == 1 else p.pipeline * (1 + (p.pipeline - 1) / (p.pipeline * p.virtual))
    return every / p.pipeline * in_flight + working


def _linear_values(config: Config) -> float:
    """Values a token leaves in one K layer: q, k, v before and after convolution, decay, gate, output twice."""
    k = config.model.kda
    return 10.0 * k.heads * k.head_dim / config.parallel.tensor


def _attention_values(config: Config) -> float:
    a, tensor = config.model.mla, config.parallel.tensor
    query = a.heads * (a.nope_dim + a.shared_dim)
    latents = 2 * (a.kv_lora_rank + (a.q_lora_rank or 0)) + a.shared_dim
    return (2 * query + 4 * a.heads * a.v_dim) / tensor + latents


def _expert_values(config: Config) -> float:
    """Values a token leaves in one MoE layer: dispatched inputs, gate, up and product of its experts, shared part."""
    moe, tensor = config.model.moe, config.parallel.tensor
    spread = tensor if checks.sequence_parallel(config) else 1
    width = moe.latent or config.model.hidden_size
    routed = moe.top_k * (2 * width + 3 * moe.expert_hidden) + 3 * width
    return routed / spread + 3 * moe.shared_experts * moe.expert_hidden / tensor
