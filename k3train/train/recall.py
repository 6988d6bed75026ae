"""Training on synthetic recall: the data without a tokenizer, and the share of held-out answers that are right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from k3train.config.schema import Config
from k3train.engine.base import Batch
from k3train.model.context import PackedStream

PREFIX = "recall:"


def datasets(config: Config) -> tuple[Any, Any]:
    """Endless training and held-out `RecallDataset`s of `data.corpus=recall:TASK`. Raises DataError where an episode
    does not fit train.seq_length or its keys model.vocab_size."""
    from k3data.recall import HELD_OUT, TRAIN, RecallDataset, parse_task

    task = parse_task(config.data.corpus)
    length, vocabulary, seed = config.train.seq_length, config.model.vocab_size, config.run.seed
    return (
        RecallDataset(task, length, vocab_size=vocabulary, seed=seed, stream=TRAIN),
        RecallDataset(task, length, vocab_size=vocabulary, seed=seed, stream=HELD_OUT),
    )


@torch.no_grad()
def accuracy(engine: Any, batches: Iterator[Batch], micro_batches: int) -> float:
    """Share of the labels with a loss that are the most likely next token, over `micro_batches` of every rank."""
    from k3train.engine.megatron import _fan_out

    layout, device = engine.layout, engine.device
    counts = torch.zeros(2, dtype=torch.float64, device=device)  # right, asked

    def forward(source: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        batch = {name: tensor.to(device) for name, tensor in next(source).items()}
        total = batch["tokens"].shape[0]
        part = total // layout.sizes.context
        start = layout.cp.rank() * part
        stream = PackedStream(batch["cu_seqlens"], total, sequence_length=engine.config.train.seq_length)
        asked = batch["loss_mask"].narrow(0, start, part) > 0
        labels = batch["labels"].narrow(0, start, part)[asked]

        def take(logits: torch.Tensor, non_loss_data: bool = False) -> None:
            best = most_likely(logits[asked].float(), layout.tp)
            counts[0] += (best == labels).sum()
            counts[1] += labels.numel()

        return model(batch["tokens"].narrow(0, start, part), None, stream), take

    for model in engine.ddp:
        model.eval()
    sources = _fan_out(batches, micro_batches, len(engine.ddp))
    engine.run_schedule(forward, sources, micro_batches, forward_only=True, collect_non_loss_data=True)
    for model in engine.ddp:
        model.train()
    if layout.tp.rank() > 0:  # its ranks counted the same
        counts.zero_()
    dist.all_reduce(counts)  # only ranks of the last stage counted
    return float(counts[0] / counts[1].clamp(min=1))


def suite_accuracy(engine: Any, config: Config, suite: str, samples: int | None = None) -> float:
    """`accuracy` on the held-out episodes of another task, `recall:TASK`, in sequences of train.seq_length.

    samples: sequences; None takes train.eval_samples. Raises DataError where the task fits no sequence.
    """
    from k3data.loader import evaluation_batches, evaluation_steps
    from k3data.recall import HELD_OUT, RecallDataset, parse_task
    from k3train.train.data import as_engine_batches

    train, layout = config.train, engine.layout
    dataset = RecallDataset(
        parse_task(suite), train.seq_length, vocab_size=config.model.vocab_size, seed=config.run.seed, stream=HELD_OUT
    )
    count = train.eval_samples if samples is None else samples
    share = {"micro_batch_size": train.micro_batch, "dp_size": layout.sizes.data}
    batches = evaluation_batches(dataset, count, device=engine.device, dp_rank=layout.dp.rank(), **share)
    return accuracy(engine, as_engine_batches(batches), evaluation_steps(dataset, count, **share))


def most_likely(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Token ids int64 [N] from logits [N, V_local] whose vocabulary is cut over `group`; the lowest of equals."""
    value, index = logits.max(-1)
    if group.size() == 1:
        return index
    mine = torch.stack([value.double(), (index + group.rank() * logits.shape[-1]).double()])
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    stacked = torch.stack(everyone)  # [ranks, 2, N]
    winner = stacked[:, 0].argmax(0, keepdim=True)
    return stacked[:, 1].gather(0, winner)[0].long()
