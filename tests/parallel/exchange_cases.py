"""What the ranks run to test the exchange of the experts' rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from k3train.engine import gradients
from k3train.parallel.expert_exchange import ExchangePlan, ExpertExchange
from tests.parallel.tiny import batches, make_engine

TOKENS, WIDTH, TOP_K, EXPERTS = 24, 5, 2, 12


def tokens_of(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x fp32 [T, D], weights fp32 [T, k], experts int64 [T, k]. Nobody chooses the last rank's experts but rank 0."""
    generator = torch.Generator().manual_seed(rank)
    allowed = EXPERTS if rank == 0 else EXPERTS // 2
    experts = torch.rand(TOKENS, allowed, generator=generator).topk(TOP_K, dim=-1).indices
    x, weights = (torch.randn(TOKENS, n, generator=generator) for n in (WIDTH, TOP_K))
    return x, weights, experts


def apply_expert(rows: torch.Tensor, weights: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """What expert e makes of its rows, each of another row alone."""
    return torch.sin(rows * (1.0 + expert[:, None])) * weights[:, None]


def exchange(kind: str, capacity: float, poison: bool) -> dict[str, Any]:
    """Experts applied to every rank's tokens through the exchange, and by hand: outputs and gradients of both.

    poison: what comes out of rows that hold nothing is NaN, forward and backward.
    """
    group, rank = dist.group.WORLD, dist.get_rank()
    plan = ExchangePlan(kind, capacity, fullest=torch.zeros(1, dtype=torch.int32))
    layer = ExpertExchange(plan, group, EXPERTS)
    x, weights, experts = tokens_of(rank)
    seen = []
    for through in (True, False):
        leaf, weight = x.clone().requires_grad_(), weights.clone().requires_grad_()
        if through:
            journey = layer.depart(leaf, weight, experts, exact=False)
            rows, counts, row_weights = journey.arrive()
            expert = torch.arange(layer.local).repeat_interleave(counts) + rank * layer.local
            held = expert.numel()
            out = apply_expert(rows[:held], row_weights[:held], expert)
            rest = rows[held:] * row_weights[held:, None]
            journey.send_back(torch.cat([out, rest * float("nan") if poison else rest]))
            y = journey.home()
        else:
            copies = leaf.repeat_interleave(TOP_K, 0)
            y = apply_expert(copies, weight.reshape(-1), experts.reshape(-1)).view(TOKENS, TOP_K, WIDTH).sum(1)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        seen.append([t.detach().numpy() for t in (y, leaf.grad, weight.grad)])
    return {"through": seen[0], "by hand": seen[1], "overflowed": plan.overflowed(), "rows": rows.shape[0]}


def steps(sizes: dict[str, Any], overrides: dict[str, Any] | None = None, count: int = 2) -> list[dict[str, Any]]:
    """Train a few steps and tell losses, norms, loads, biases and metrics."""
    import warnings

    engine, seen = make_engine(sizes, overrides), []
    for step in range(count):
        micro = engine.micro_batches(engine.config.train.global_batch)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            result = engine.step(batches(engine.config, engine.layout, step, 3), engine.config.optim.lr, micro)
        seen.append({
            "loss": result.loss, "norm": result.grad_norm, "skipped": result.skipped, "extra": result.extra,
            "load": None if result.load is None else result.load.numpy(),
            "biases": [r.bias.clone().numpy() for r in gradients.routers(engine.models)],
            "warned": [str(w.message) for w in warned if "expert_capacity" in str(w.message)],
        })  # fmt: skip
    held_out = list(batches(engine.config, engine.layout, 9, 3))
    seen[-1]["evaluation"] = engine.evaluate(iter(held_out), len(held_out))
    return seen
