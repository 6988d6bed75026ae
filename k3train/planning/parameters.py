"""How many parameters a model has, by part, from its shapes alone.

Shapes: spec of the released checkpoints (Kimi K3 technical report, Kimi Linear report). Tested against the model built
on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from k3train.config.schema import ModelConfig, expand_pattern


@dataclass(frozen=True)
class Parts:
    """Parameters of a model by part: every tensor a checkpoint holds, the routers' balancing biases included."""

    embedding: int
    linear_mixers: int  # all K layers: KDA or the ladder's mixer in its place
    full_attention: int  # all F layers: gated MLA
    dense: int
    routers: int
    latent: int  # projections in and out of the routed experts' width, and their norm
    shared_experts: int
    routed_experts: int
    attention_residuals: int
    norms: int
    head: int
    further: int  # multi-token prediction: there while training, not in exports
    routed_experts_active: int  # of routed_experts, those a token passes through

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "routed_experts_active")

    @property
    def active(self) -> int:
        """Parameters a token passes through, the embedding look-up and multi-token prediction left out."""
        return self.total - self.embedding - self.further - self.routed_experts + self.routed_experts_active

    def by_part(self) -> dict[str, int]:
        """Named counts that add up to the total."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "routed_experts_active"}


def count(model: ModelConfig) -> Parts:
    """Count the parameters of `model` by part."""
    layers = expand_pattern(model.pattern, model.hybrid)
    d, moe = model.hidden_size, model.moe
    dense, sparse = min(model.dense_layers, len(layers)), max(0, len(layers) - model.dense_layers)
    width = moe.latent or d
    expert = 3 * width * moe.expert_hidden
    residuals = model.attention_residuals != "off"
    return Parts(
        embedding=model.vocab_size * d,
        linear_mixers=layers.count("K") * sum(linear_mixer(model).values()),
        full_attention=layers.count("F") * sum(full_attention(model).values()),
        dense=dense * 3 * d * model.dense_hidden,
        routers=sparse * moe.experts * (d + 1),
        latent=sparse * (latent_projections(model) + (width if moe.latent_norm else 0)),
        shared_experts=sparse * 3 * d * moe.shared_experts * moe.expert_hidden,
        routed_experts=sparse * moe.experts * expert,
        attention_residuals=2 * d * (2 * len(layers) + 1) if residuals else 0,
        norms=d * (2 * len(layers) + 1),
        head=model.vocab_size * d,
        further=model.mtp_layers * (sum(further_layer(model).values()) + moe.experts * expert),
        routed_experts_active=sparse * moe.top_k * expert,
    )


def linear_mixer(model: ModelConfig) -> dict[str, int]:
    """Parameters of one K layer: `projections` (applied as matrix products) and `vectors` (the rest)."""
    d, heads, size = model.hidden_size, model.kda.heads, model.kda.head_dim
    inner = heads * size
    gate = d * inner if model.kda.output_gate == "full" else size * (d + inner)
    projections = 4 * d * inner + gate  # q, k, v, o and the output gate
    vectors = 3 * inner * model.kda.conv_size + size  # convolutions and the output norm
    if model.mixer == "kda":
        projections += size * (d + inner)  # decay, low rank
        vectors += inner + heads  # dt_bias, A_log
    elif model.mixer == "gated_delta":
        projections += d * heads
        vectors += 2 * heads
    if model.mixer in ("kda", "gated_delta", "delta"):
        projections += d * heads  # beta
    return {"projections": projections, "vectors": vectors}


def full_attention(model: ModelConfig) -> dict[str, int]:
    """Parameters of one F layer: `projections` and `vectors`."""
    d, a = model.hidden_size, model.mla
    query = a.heads * (a.nope_dim + a.shared_dim)
    projections = d * query if a.q_lora_rank is None else a.q_lora_rank * (d + query)
    projections += d * (a.kv_lora_rank + a.shared_dim) + a.kv_lora_rank * a.heads * (a.nope_dim + a.v_dim)
    projections += d * a.heads * a.v_dim * (2 if a.output_gate else 1)
    return {"projections": projections, "vectors": a.kv_lora_rank + (a.q_lora_rank or 0)}


def further_layer(model: ModelConfig) -> dict[str, int]:
    """Parameters of the layer of multi-token prediction, its routed experts left out: `projections` and `vectors`."""
    d, moe = model.hidden_size, model.moe
    attention = full_attention(model)
    shared = 3 * d * moe.shared_experts * moe.expert_hidden
    projections = 2 * d * d + attention["projections"] + latent_projections(model) + shared + moe.experts * d
    norms = 5 * d + ((moe.latent or d) if moe.latent_norm else 0)
    return {"projections": projections, "vectors": attention["vectors"] + norms + moe.experts}


def latent_projections(model: ModelConfig) -> int:
    """Parameters of the projections into and out of the latent width of one layer; 0 without a latent."""
    return 0 if model.moe.latent is None else 2 * model.hidden_size * model.moe.latent


@dataclass(frozen=True)
class Layer:
    """Parameters of one layer by what splits them: tensor ranks, nothing, or expert ranks."""

    split: int
    replicated: int
    experts: int


def of_layer(model: ModelConfig, index: int) -> Layer:
    """Parameters of global layer `index`."""
    kind = expand_pattern(model.pattern, model.hybrid)[index]
    d, moe = model.hidden_size, model.moe
    mixer = linear_mixer(model) if kind == "K" else full_attention(model)
    vectors = 2 * d * (3 if model.attention_residuals != "off" else 1)  # norms, and queries and norms over depth
    if index < model.dense_layers:
        return Layer(sum(mixer.values()) + 3 * d * model.dense_hidden, vectors, 0)
    width = moe.latent or d
    shared = 3 * d * moe.shared_experts * moe.expert_hidden
    around = moe.experts * (d + 1) + latent_projections(model) + (width if moe.latent_norm else 0)
    return Layer(sum(mixer.values()) + shared, vectors + around, moe.experts * 3 * width * moe.expert_hidden)


def layer_costs(model: ModelConfig) -> list[float]:
    """Weights that a token passes through in each layer, the head's with the last layer: the work of a layer, nearly.

    Attention over the sequence and the recurrence are left out: they are small beside the products at the lengths that
    are pipelined.
    """
    moe, d = model.moe, model.hidden_size
    mixers = {"K": linear_mixer(model)["projections"], "F": full_attention(model)["projections"]}
    dense = 3 * d * model.dense_hidden
    routed = moe.top_k * 3 * (moe.latent or d) * moe.expert_hidden + latent_projections(model) + moe.experts * d
    sparse = routed + 3 * d * moe.shared_experts * moe.expert_hidden
    kinds = expand_pattern(model.pattern, model.hybrid)
    costs = [float(mixers[kind] + (dense if i < model.dense_layers else sparse)) for i, kind in enumerate(kinds)]
    costs[-1] += d * model.vocab_size
    if model.mtp_layers:
        experts = moe.top_k * 3 * (moe.latent or d) * moe.expert_hidden
        costs[-1] += further_layer(model)["projections"] + experts + d * model.vocab_size
    return costs
