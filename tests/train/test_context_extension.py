"""A longer context from the checkpoint of a shorter one: the chain of experiments, small on CPU, and 8K to 64K on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from k3train.config.compose import compose
from k3train.engine.base import Batch
from k3train.engine.megatron import MegatronEngine
from tests.train import warm

SHRUNK = ("model=k3_tiny", "train.recompute=none", "optim.lr=2e-3", "schedule.warmup_fraction=0.2", "train.log_every=1")


@pytest.mark.ops
def test_512_tokens_then_4096_over_two_context_ranks(tmp_path: Path) -> None:
    def leg(name: str, length: int, *overrides: str, world: int = 1, steps: int = 8) -> warm.Job:
        words = [f"experiment={name}", *SHRUNK, f"train.seq_length={length}", f"train.steps={steps}", *overrides]
        job = warm.start(tmp_path, name, *words, world=world)
        assert job.wait(400) == [0] * world, job.output()
        return job

    first = leg("context_8k", 512, "checkpoint.load=null", "train.global_batch=8", steps=24)
    losses = [loss for _, loss in first.losses()]
    # checkpoint.load, parallel.context=2 and the optimizer's state come from the experiment itself
    second = leg("context_64k", 4096, "train.global_batch=1", world=2, steps=4)
    longer = [loss for _, loss in second.losses()]
    assert "starting from the weights of" in second.output() and "CP2" in second.output()
    assert len(losses) == 24 and len(longer) == 4 and all(map(math.isfinite, longer))
    fallen = losses[0] - sum(losses[-4:]) / 4
    assert fallen > 0.5
    assert losses[0] - sum(longer) / 4 > 0.6 * fallen, (losses, longer)


def markov(length: int, step: int, vocabulary: int) -> Batch:
    """One document in which four of five tokens follow from the one before."""
    generator = torch.Generator().manual_seed(step)
    jumps = torch.randint(0, vocabulary, (length + 1,), generator=generator)
    random = torch.rand(length + 1, generator=generator) < 0.2
    random[0] = True
    starts = torch.arange(length + 1).masked_fill(~random, 0).cummax(0).values
    tokens = (jumps[starts] + 7 * (torch.arange(length + 1) - starts)) % vocabulary
    ends = torch.tensor([0, length], dtype=torch.int32)
    return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": torch.ones(length), "cu_seqlens": ends}


def stage(
    layout: Any, device: torch.device, name: str, length: int, steps: int, load: Path | None, save: Path | None
) -> list[float]:
    """Losses of a stage of the chain in one process, one sequence a step."""
    words = [f"experiment={name}", "model=k3_tiny", "model.vocab_size=512", f"train.seq_length={length}"]
    config = compose([*words, "parallel.context=1", "train.global_batch=1", "train.precision=auto"])
    engine = MegatronEngine(config, layout, device)
    if load is not None:
        engine.load(load)

    def data() -> Iterator[list[Batch]]:
        for step in range(steps):
            yield [markov(length, 1000 * length + step, 32)]

    results = [engine.step(iter(batch), 1e-2, 1) for batch in data()]
    assert not any(r.skipped for r in results)
    if save is not None:
        save.mkdir()
        engine.save(save, {"step": steps})
    return [r.loss for r in results]


def chained(layout: Any, device: torch.device, folder: Path, short: int, long: int, steps: int) -> None:
    first = stage(layout, device, "context_8k", short, steps, None, folder / "short")
    second = stage(layout, device, "context_64k", long, 4, folder / "short", None)
    print(f"{short} tokens: {first[0]:.3f} -> {first[-1]:.3f}; {long} tokens: {second[0]:.3f} -> {second[-1]:.3f}")
    assert first[-1] < first[0] - 0.7
    assert abs(second[0] - first[-1]) < 0.3 * (first[0] - first[-1])  # nothing is forgotten by eight times the length
    assert second[-1] < second[0] + 0.1


@pytest.mark.ops
def test_the_stages_chain_in_one_process(one_rank: Any, tmp_path: Path) -> None:
    chained(one_rank, torch.device("cpu"), tmp_path, 128, 512, 16)


@pytest.mark.gpu
def test_eight_thousand_tokens_then_sixty_four_thousand(one_rank: Any, tmp_path: Path) -> None:
    chained(one_rank, torch.device("cuda", 0), tmp_path, 8192, 65536, 30)
