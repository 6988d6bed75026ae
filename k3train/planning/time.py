"""Seconds of an optimizer step, from FLOPs, bytes and stated speeds: a closed form to compare layouts by.

step = compute / (1 - bubble) + communication that nothing hides. Compute is the model FLOPs at an assumed share of
the peak; the speeds below are assumptions, printed with every estimate, and none of them is measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3train.config import checks
from k3train.config.activations import computed_again
from k3train.config.schema import Config, expand_pattern
from k3train.planning import flops, memory

ASSUMED_MFU = 0.35  # of the dense BF16 peak, inside one rank, communication left out
NODE_BYTES = 350e9  # bytes a second between GPUs of a node, each way
NETWORK_BYTES = 45e9  # bytes a second and GPU between nodes, each way
LATENCY = 20e-6  # seconds of a collective or transfer beside its bytes
HOST = 1e-3  # seconds in which the host can launch one layer's forward and backward; small models are bound by it


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by cause."""

    compute: float
    recompute: float
    bubble: float
    expert_exchange: float
    tensor_exchange: float
    context_exchange: float
    stage_exchange: float
    gradient_exchange: float

    @property
    def total(self) -> float:
        return sum(self.by_part().values())

    def by_part(self) -> dict[str, float]:
        return dict(vars(self))


def estimate(config: Config, world: int, gpus_per_node: int = 8) -> StepTime:
    """Seconds of one optimizer step of `world` GPUs."""
    m, p, t = config.model, config.parallel, config.train
    data = world // (p.tensor * p.pipeline * p.context)
    micro_batches = max(1, t.global_batch // (t.micro_batch * data))
    tokens = t.global_batch * t.seq_length
    pattern = expand_pattern(m.pattern, m.hybrid)
    layers = len(pattern) / p.pipeline
    compute = tokens * flops.flops_per_token(m, t.seq_length) / (world * flops.PEAK_TFLOPS * 1e12 * ASSUMED_MFU)
    compute = max(compute, HOST * layers * micro_batches)
    again = compute / 3 * max(_share_again(config, rank) for rank in range(p.pipeline))
    # interleaved 1F1B: the pipeline fills and drains once a step, a virtual stage at a time
    bubble = (compute + again) * (p.pipeline - 1) / (p.virtual * micro_batches)

    sparse = max(0, len(pattern) - m.dense_layers) / p.pipeline
    rank_tokens = memory.stream_tokens(config) * micro_batches
    width = m.moe.latent or m.hidden_size
    local = rank_tokens / (p.tensor if checks.sequence_parallel(config) else 1)
    # dispatch and combine, forward and backward
    routed = 4 * sparse * local * m.moe.top_k * width * 2 * (1 - 1 / p.expert)
    # each sublayer gathers its input and scatters its output, forward and backward
    tensor = 8 * layers * rank_tokens * m.hidden_size * 2 * (1 - 1 / p.tensor)
    context = _context_bytes(config, pattern, micro_batches)
    # activations to the next stage and their gradients back; a border carries the running sum and the new blocks
    blocks = len(pattern) / m.residual_block / p.pipeline if m.attention_residuals == "block" else 0.0
    crossings = 2 * micro_batches * p.virtual if p.pipeline > 1 else 0
    staged = crossings * (1 + blocks) * memory.stream_tokens(config) * m.hidden_size * 2
    held = memory.rank_parameters(config, world)
    # gradients are reduce-scattered in fp32, weights gathered in bf16
    reduced = 6 * ((held.dense if held.dense_shards > 1 else 0) + (held.experts if held.expert_shards > 1 else 0))
    hidden = 0.2 if p.overlap_grad_reduce else 1.0

    def seconds(size: float, ranks: int, calls: float) -> float:
        return size / _speed(ranks, gpus_per_node) + calls * LATENCY if size else 0.0

    return StepTime(
        compute,
        again,
        bubble,
        seconds(routed, p.expert * (p.tensor if p.expert > 1 else 1), 4 * sparse * micro_batches),
        seconds(tensor, p.tensor, 8 * layers * micro_batches),
        seconds(context, p.tensor * p.context, 2 * layers * micro_batches),
        seconds(staged, p.tensor * p.context * p.pipeline, crossings),
        seconds(hidden * reduced, world, 2),
    )


def _share_again(config: Config, rank: int) -> float:
    """The share of a pipeline rank's layers whose forward the backward runs again."""
    layers, t = memory.layers_of_rank(config, rank), config.train
    return sum(computed_again(t.recompute, t.recompute_layers, i) for i in layers) / max(1, len(layers))


def _context_bytes(config: Config, pattern: str, micro_batches: int) -> float:
    """One gather of (transition, state) pairs a K layer and of latents an F layer, forward and backward."""
    m, p = config.model, config.parallel
    if p.context == 1:
        return 0.0
    pair = 2 * m.kda.heads / p.tensor * m.kda.head_dim**2 * 4
    latent = config.train.micro_batch * config.train.seq_length * (m.mla.kv_lora_rank + m.mla.shared_dim) * 2
    a_layer = pattern.count("K") * pair * p.context + pattern.count("F") * latent
    return 2 * micro_batches * a_layer / p.pipeline


def _speed(ranks: int, gpus_per_node: int) -> float:
    return NODE_BYTES if ranks <= gpus_per_node else NETWORK_BYTES


def assumptions() -> str:
    """The speeds behind an estimate, in one line."""
    return (
        f"assumed, not measured: {ASSUMED_MFU:.0%} of {flops.PEAK_TFLOPS} TFLOP/s inside a rank, "
        f"{NODE_BYTES / 1e9:.0f} GB/s in a node, {NETWORK_BYTES / 1e9:.0f} GB/s a GPU between nodes, "
        f"{LATENCY * 1e6:.0f} us a call, {HOST * 1e3:.0f} ms of host time a layer"
    )
