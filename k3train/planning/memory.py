"""Bytes on the fullest rank of a layout: weights, gradients, optimizer state, activations in flight.

An estimate to choose layouts by, from shapes alone. Weights and their gradients are counted exactly, for the layers
that each stage holds. Activations count the tensors that backward keeps under the given policies on the GPU path
(Triton kernels, fused mixes and losses), without allocator slack and without the temporary buffers of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from k3train.config import activations as classes
from k3train.config import checks
from k3train.config.schema import Config, expand_pattern
from k3train.parallel.pipeline import split_layers
from k3train.planning import parameters

GIB = float(1 << 30)
CHUNK = 64  # tokens of a chunk of the recurrence: one state, and two squares of it, are kept for each
LOGITS = 1 << 30  # bytes that the chunked loss lets logits take, and tokens it takes at most
LOGITS_TOKENS = 4096


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
    """Memory of the fullest of `world` ranks in bf16 training (fp32 where train.precision says so)."""
    return max((_of_rank(config, world, rank) for rank in range(config.parallel.pipeline)), key=lambda m: m.total)


def _of_rank(config: Config, world: int, rank: int) -> Memory:
    """Memory of a rank of pipeline stage `rank`."""
    held = _held(config, world, rank)
    number = 4 if config.train.precision == "fp32" else 2
    moments = 4.0 if config.optim.name == "muon" else 8.0  # one momentum for matrices, or two
    master = 0.0 if number == 4 else 4.0
    split = config.parallel.distributed_optimizer or (config.engine.name == "deepspeed")
    owned = held.dense / (held.dense_shards if split else 1) + held.experts / (held.expert_shards if split else 1)
    return Memory(
        weights=number * (held.dense + held.experts),
        gradients=4.0 * (held.dense + held.experts),
        optimizer=(master + moments) * owned,
        activations=activations(config, number, rank),
        logits=_loss(config, number) if rank == config.parallel.pipeline - 1 else 0.0,
    )


def layers_of_rank(config: Config, rank: int) -> list[int]:
    """Global indices of the layers on pipeline stage `rank`, all its virtual stages together, as the engine cuts them."""
    p, m = config.parallel, config.model
    costs = parameters.layer_costs(m)
    ranges = split_layers(len(costs), p.pipeline * p.virtual, p.pipeline_layout, costs, pipeline=p.pipeline)
    return [i for v in range(p.virtual) for i in range(*ranges[v * p.pipeline + rank])]


def rank_parameters(config: Config, world: int) -> RankParameters:
    """Parameters of the fullest rank."""
    ranks = (_held(config, world, rank) for rank in range(config.parallel.pipeline))
    return max(ranks, key=lambda held: held.dense + held.experts)


def _held(config: Config, world: int, rank: int) -> RankParameters:
    p, m = config.parallel, config.model
    parts = parameters.count(m)
    every = len(expand_pattern(m.pattern, m.hybrid))
    layers = [parameters.of_layer(m, i) for i in layers_of_rank(config, rank)]
    dense = sum(layer.split / p.tensor + layer.replicated for layer in layers)
    experts: float = sum(layer.experts for layer in layers)
    if rank == 0:
        dense += parts.embedding / p.tensor
    if rank == p.pipeline - 1:  # the head, what the output reads over depth, and layers that belong to no stage
        whole = [parameters.of_layer(m, i) for i in range(every)]
        beside = parts.total - parts.embedding - parts.head - sum(x.split + x.replicated + x.experts for x in whole)
        beside_experts = parts.routed_experts - sum(x.experts for x in whole)
        beside_experts += parts.further - m.mtp_layers * sum(parameters.further_layer(m).values())
        dense += parts.head / p.tensor + beside - beside_experts
        experts += beside_experts
    return RankParameters(
        dense=dense,
        experts=experts / p.expert,
        dense_shards=world // (p.tensor * p.pipeline),
        expert_shards=max(1, world // (p.pipeline * p.expert)),
    )


def stream_tokens(config: Config) -> float:
    """Tokens of one micro-batch on one context rank."""
    return config.train.micro_batch * config.train.seq_length / config.parallel.context


def _loss(config: Config, number: int) -> float:
    """The chunked loss: logits of a chunk and their gradients, and the head's gradient in fp32 and as it is handed on;
    the gradients of what the head read."""
    m, tokens = config.model, stream_tokens(config)
    vocabulary = m.vocab_size / config.parallel.tensor
    chunk = min(tokens, m.loss_chunk or LOGITS_TOKENS, LOGITS / (vocabulary * number))
    return chunk * vocabulary * 2 * number + (4 + number) * vocabulary * m.hidden_size + tokens * m.hidden_size * number


def activations(config: Config, number: int = 2, rank: int = 0) -> float:
    """Bytes that backward keeps on a rank of pipeline stage `rank`, all micro-batches in flight.

    The peak is the fullest moment of a backward. When it comes to a region of layers, those behind have let go of theirs:
    what is left are the inputs of the recomputed regions up to it, what the kept layers up to it keep, and, where it is
    recomputed, all that its layers made again. The other micro-batches wait with everything.
    """
    m, p, train = config.model, config.parallel, config.train
    pattern = expand_pattern(m.pattern, m.hybrid)
    kinds = classes.policies(train)
    tokens = stream_tokens(config)
    spread = p.tensor if checks.sequence_parallel(config) else 1
    d = m.hidden_size / spread
    each: dict[int, float] = {}
    for i in layers_of_rank(config, rank):
        mixer = (_linear_values if pattern[i] == "K" else _attention_values)(config, kinds, number)
        dense = _kept(kinds["units"], 2, number) * m.dense_hidden / p.tensor
        feed = dense if i < m.dense_layers else _expert_values(config, kinds, number)
        each[i] = tokens * number * (mixer + feed + 4 * d)  # of two sublayers, the input and the running sum
    if m.mtp_layers and rank == p.pipeline - 1:
        further = _attention_values(config, kinds, number) + _expert_values(config, kinds, number) + 8 * d
        each[len(pattern)] = tokens * number * further
    source = tokens * number * d if kinds["layer_inputs"] == "keep" else 0.0  # the other sources are of layers before
    waiting, peak = 0.0, 0.0
    for again, indices in classes.regions(train.recompute, train.recompute_layers, list(each)):
        held = sum(each[i] for i in indices)
        full = any(i >= len(pattern) or pattern[i] == "F" for i in indices)
        gathered = tokens * number * _gathered_values(config) if again and full else 0.0
        peak = max(peak, waiting + held + gathered + (source if again else 0.0))
        waiting += source if again else held
    return waiting * (_in_flight(config, rank) - 1) + peak


def _in_flight(config: Config, rank: int) -> float:
    """Micro-batches of all a rank's layers that wait for their backward: 1F1B, or interleaved with its warm-up."""
    p = config.parallel
    if p.virtual == 1:
        return p.pipeline - rank
    return (2 * (p.pipeline - rank - 1) + (p.virtual - 1) * p.pipeline + 1) / p.virtual


def _kept(policy: str, inputs: int, number: int) -> float:
    """Values of `number` bytes that a function of a class of tensors leaves: its inputs and its result."""
    in_fp8 = (1 + 4 / 128) / number  # a byte, and its part of a scale
    return {"keep": inputs + 1.0, "recompute": float(inputs), "fp8": (inputs + 1) * in_fp8}[policy]


def _linear_values(config: Config, kinds: dict[str, str], number: int) -> float:
    """Values a token leaves in one K layer. In units of heads * head_dim: q, k, v before and after convolution, the raw
    decay, three scaled copies of q and k, the output, its gate and the gated output, the chunk's updates; then a state
    and two squares a chunk."""
    k = config.model.kda
    return (
        (11 + _kept(kinds["gates"], 2, number) + k.head_dim / CHUNK + 2 * CHUNK / k.head_dim)
        * k.heads
        * k.head_dim
        / (config.parallel.tensor)
    )


def _attention_values(config: Config, kinds: dict[str, str], number: int) -> float:
    """Values a token leaves in one F layer: queries, keys, values and output at the key's width (what torch's kernel
    takes), the output, its gate and the gated output; latents before and after their norms."""
    a, tensor = config.model.mla, config.parallel.tensor
    key = a.nope_dim + a.shared_dim
    latents = (
        _kept(kinds["norms"], 1, number) * (a.kv_lora_rank + (a.q_lora_rank or 0)) + a.kv_lora_rank + 2 * a.shared_dim
    )
    return a.heads * (4 * key + (1 + _kept(kinds["gates"], 1, number)) * a.v_dim) / tensor + latents


def _gathered_values(config: Config) -> float:
    """Values a token of a rank adds in one F layer under context parallelism, while a recomputed region walks back: keys and
    values of the other ranks' tokens, and gradients of all of them. Where the layer is not recomputed they exist only inside
    the attention, which expands them again by itself."""
    a, ranks = config.model.mla, config.parallel.context
    whole = a.heads * (a.nope_dim + a.shared_dim + a.v_dim) / config.parallel.tensor
    return (2 * ranks - 1) * whole if ranks > 1 else 0.0


def _expert_values(config: Config, kinds: dict[str, str], number: int) -> float:
    """Values a token leaves in one MoE layer: dispatched inputs, gate, up and product of its experts, latents."""
    moe, tensor = config.model.moe, config.parallel.tensor
    spread = tensor if checks.sequence_parallel(config) else 1
    width = moe.latent or config.model.hidden_size
    unit = _kept(kinds["units"], 2, number)
    routed = _slots(config) * moe.top_k * (width + unit * moe.expert_hidden)
    routed += _kept(kinds["norms"], 1, number) * width
    return routed / spread + unit * moe.shared_experts * moe.expert_hidden / tensor


def _slots(config: Config) -> float:
    """Rows that experts have room for, over those that are routed."""
    p, moe = config.parallel, config.model.moe
    if p.expert == 1 or p.expert_exchange != "slots":
        return 1.0
    return min(p.expert_capacity, p.expert * min(moe.top_k, moe.experts // p.expert) / moe.top_k)
