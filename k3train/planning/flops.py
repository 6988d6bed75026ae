"""Model FLOPs per token, and the formula in words.

The convention, fixed so that numbers compare: a matrix product of [m, k] and [k, n] is 2*m*k*n; a step is three times
the forward; recomputation is not counted. Counted: every projection, the router, latent, shared, routed and dense
matrices, the head, and with multi-token prediction its layer and the head a second time; causal attention as half of
the full product; the delta-rule mixers by the chunk algorithm's products at chunk 64 whatever kernel runs. Not counted:
the embedding look-up, convolutions, norms, gates, the attention-residual mixes and the optimizer. Document boundaries
inside a sequence are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from k3train.config.schema import ModelConfig, expand_pattern
from k3train.planning import parameters

PEAK_TFLOPS = 989.5
"""Dense BF16 TFLOP/s of one H100 or H200; MFU is a share of this."""

CHUNK = 64


@dataclass(frozen=True)
class Forward:
    """Forward FLOPs per token by part, for the whole model."""

    linear_projections: float
    linear_recurrence: float
    full_projections: float
    full_attention: float
    dense: float
    router: float
    latent: float
    shared_experts: float
    routed_experts: float
    head: float
    further: float  # multi-token prediction

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self))

    def by_part(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def forward(model: ModelConfig, seq_length: int) -> Forward:
    """Forward FLOPs per token, averaged over a sequence of `seq_length` tokens."""
    layers = expand_pattern(model.pattern, model.hybrid)
    linear, full = layers.count("K"), layers.count("F")
    parts = parameters.count(model)
    sparse = max(0, len(layers) - model.dense_layers)
    mla = model.mla
    attention = mla.heads * seq_length * (mla.nope_dim + mla.shared_dim + mla.v_dim)
    experts = model.moe.top_k * 3 * (model.moe.latent or model.hidden_size) * model.moe.expert_hidden
    further = 2.0 * (parameters.further_layer(model)["projections"] + experts + parts.head) + attention
    return Forward(
        linear_projections=2.0 * linear * parameters.linear_mixer(model)["projections"],
        linear_recurrence=float(linear * model.kda.heads * recurrence(model, seq_length)),
        full_projections=2.0 * full * parameters.full_attention(model)["projections"],
        full_attention=float(full * attention),
        dense=2.0 * parts.dense,
        router=2.0 * sparse * model.moe.experts * model.hidden_size,
        latent=2.0 * sparse * parameters.latent_projections(model),
        shared_experts=2.0 * parts.shared_experts,
        routed_experts=2.0 * parts.routed_experts_active,
        head=2.0 * parts.head,
        further=model.mtp_layers * further,
    )


def recurrence(model: ModelConfig, seq_length: int) -> float:
    """FLOPs per token and head of a K layer's mixer, projections left out.

    Chunk algorithm with key and value size D and chunk C, per token: reading the state for keys and for queries and
    writing it, 2*D*D each; the causal halves of key-key, query-key, their products with the updates and the solve's
    application, C*D each; inverting the unit triangle, C*C/3. Without a delta rule (linear) the key-key, solve and
    key-read terms fall away; softmax is causal attention.
    """
    size = float(model.kda.head_dim)
    if model.mixer == "softmax":
        return 2.0 * seq_length * size
    if model.mixer == "linear":
        return 4 * size * size + 2 * CHUNK * size
    return 6 * size * size + 4 * CHUNK * size + CHUNK * CHUNK / 3


def flops_per_token(model: ModelConfig, seq_length: int) -> float:
    """Forward and backward model FLOPs per token."""
    return 3.0 * forward(model, seq_length).total


def mfu(model: ModelConfig, seq_length: int, tokens_per_second: float, devices: int) -> float:
    """Share of the devices' dense BF16 peak that the model FLOPs at this speed are."""
    return flops_per_token(model, seq_length) * tokens_per_second / (devices * PEAK_TFLOPS * 1e12)


def formula(model: ModelConfig, seq_length: int) -> str:
    """The count in words and numbers, one part a line."""
    parts = forward(model, seq_length)
    kinds = expand_pattern(model.pattern, model.hybrid)
    said = {
        "linear_projections": f"{kinds.count('K')} K layers, 2 x projection parameters",
        "linear_recurrence": f"{model.kda.heads} heads x {_recurrence_words(model, seq_length)}",
        "full_projections": f"{kinds.count('F')} F layers, 2 x projection parameters",
        "full_attention": f"{model.mla.heads} heads x {seq_length} tokens x (query size + value size), causal half",
        "dense": "2 x 3 x hidden x dense_hidden a dense layer",
        "router": "2 x experts x hidden a layer",
        "latent": "2 x 2 x hidden x latent a layer",
        "shared_experts": "2 x 3 x hidden x shared width a layer",
        "routed_experts": f"2 x 3 x width x expert_hidden x top {model.moe.top_k} a layer",
        "head": "2 x hidden x vocabulary",
        "further": "multi-token prediction: its projections, experts and attention, and the head again",
    }
    lines = [f"  {name:<19} {value:>14.4g}  {said[name]}" for name, value in parts.by_part().items() if value]
    total = 3 * parts.total
    return "\n".join(
        [f"model FLOPs a token at sequence length {seq_length} = 3 x forward = {total:.4g}; forward by part:", *lines]
    )


def _recurrence_words(model: ModelConfig, seq_length: int) -> str:
    if model.mixer == "softmax":
        return f"{seq_length} tokens x 2 x head_dim, causal half"
    if model.mixer == "linear":
        return f"(4 D^2 + 2 C D), D = {model.kda.head_dim}, C = {CHUNK}"
    return f"(6 D^2 + 4 C D + C^2/3), D = {model.kda.head_dim}, C = {CHUNK}"
