"""A short greedy sample through whatever layout trains: one forward of the whole window a token, no cache.

Meant for the end of a run; `k3train generate` is the fast way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from k3train.engine.megatron import MegatronEngine
from k3train.model.context import PackedStream


@torch.no_grad()
def greedy(engine: MegatronEngine, prompt: list[int], count: int) -> list[int]:
    """`count` token ids that follow `prompt`; the same on every rank. The window is train.seq_length tokens."""
    train = engine.config.train
    window = train.seq_length * train.micro_batch
    ids = list(prompt)
    for model in engine.ddp:
        model.eval()
    for _ in range(count):
        context = ids[-train.seq_length :]
        ids.append(_next_token(engine, context, window))
    for model in engine.ddp:
        model.train()
    return ids[len(prompt) :]


def _next_token(engine: MegatronEngine, context: list[int], window: int) -> int:
    layout, device = engine.layout, engine.device
    tokens = torch.zeros(window, dtype=torch.int64, device=device)
    tokens[: len(context)] = torch.tensor(context, device=device)
    length = engine.config.train.seq_length
    cu = torch.arange(0, window + 1, length, dtype=torch.int32, device=device)
    part = window // layout.sizes.context
    start = layout.cp.rank() * part
    position = len(context) - 1 - start
    best = torch.full((2,), float("-inf"), dtype=torch.float64, device=device)

    def forward(_batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
        output = model(tokens.narrow(0, start, part), None, PackedStream(cu, window, sequence_length=length))

        def take(logits: torch.Tensor, non_loss_data: bool = False) -> None:
            if 0 <= position < part:
                row = logits[position].float()
                value, index = row.max(0)
                best[0] = value.double()
                best[1] = index.double() + layout.tp.rank() * row.numel()

        return output, take

    engine.run_schedule(
        forward, [None] * len(engine.ddp), max(1, layout.sizes.pipeline), forward_only=True, collect_non_loss_data=True
    )
    everyone = [torch.empty_like(best) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, best)
    rows = sorted((-float(b[0]), float(b[1])) for b in everyone if torch.isfinite(b[0]))
    return int(rows[0][1])
