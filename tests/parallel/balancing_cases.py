"""What ranks run when expert balancing is looked at."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from k3kernels import routing
from k3train.engine import gradients
from k3train.model.context import PackedStream
from tests.parallel.tiny import GLOBAL, MICRO, SEED, batches, make_engine, micro_batch


def counted_tokens() -> list[int]:
    """Tokens that enter the loss, of each micro-batch of the first step."""
    streams = [micro_batch(list(range(i, i + MICRO)), SEED) for i in range(0, GLOBAL, MICRO)]
    return [int(s["loss_mask"].sum()) for s in streams]


def pooled_bias(sizes: dict[str, Any], balancing: str, tokens: int, micro_batches: int) -> dict[str, np.ndarray]:
    """One router fed with given scores, cut into micro-batches and over the ranks that hold tokens."""
    engine = make_engine(sizes, {"model.balancing": balancing})
    router = gradients.routers(engine.models)[0]
    layout = engine.layout
    experts, k = engine.config.model.moe.experts, engine.config.model.moe.top_k
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(tokens, experts, generator=generator) + torch.linspace(-1, 1, experts)
    router.bias.copy_(torch.linspace(-0.1, 0.1, experts))
    holders, place = layout.token_group.size(), layout.token_group.rank()
    for piece in logits.tensor_split(micro_batches):
        mine = piece.tensor_split(holders)[place]
        _, chosen, cut, cut_expert = routing.route(mine, router.bias, k)
        stream = PackedStream(torch.tensor([0, mine.shape[0]], dtype=torch.int32), mine.shape[0])
        router.count(chosen, mine, cut, cut_expert, stream)
    loads = gradients.balance([nn.ModuleList([router])], layout)
    return {"load": loads[router.layer].numpy(), "bias": router.bias.numpy()}


def step_with_padding(sizes: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(sizes)

    def padded() -> Any:
        for batch in batches(engine.config, engine.layout, 0, SEED):
            valid = torch.ones(batch["tokens"].shape[0], dtype=torch.bool)
            valid[3::4] = False
            yield {**batch, "valid": valid}

    micro = engine.micro_batches(engine.config.train.global_batch)
    result = engine.step(padded(), 1e-3, micro)
    assert result.load is not None
    train = engine.config.train
    biases = [r.bias.numpy() for r in gradients.routers(engine.models)]
    return {"load": result.load.numpy(), "valid": train.global_batch * train.seq_length * 3 // 4, "biases": biases}


def evaluation_leaves_biases(sizes: dict[str, Any]) -> dict[str, int]:
    engine = make_engine(sizes)
    routers = gradients.routers(engine.models)
    before = [r.bias.clone() for r in routers]
    micro = engine.micro_batches(engine.config.train.global_batch)
    engine.evaluate(batches(engine.config, engine.layout, 0, SEED), micro)
    counted = sum(r.load is not None or r.counts is not None for r in routers)
    return {"counted": counted, "moved": sum(not torch.equal(b, r.bias) for b, r in zip(before, routers))}
