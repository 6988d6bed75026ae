"""A longer context from the checkpoint of a shorter one: the chain of experiments, small on CPU, and 8K to 64K on a GPU."""

from __future__ import annotations

import math
import time
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
    layout: Any, device: torch.device, name: str, length: int, steps: int, load: Path | None, save: Path | None,
    precision: str,
) -> list[float]:  # fmt: skip
    """Losses of a stage of the chain in one process, one sequence a step. Says where it is: a device may cut it off."""
    words = [f"experiment={name}", "model=k3_tiny", "model.vocab_size=512", f"train.seq_length={length}"]
    # torch's kernels: no fused library has to be found, loaded and have plans for these head dimensions
    words += ["parallel.context=1", "train.global_batch=1", f"train.precision={precision}", "model.backend=torch"]
    begun = time.perf_counter()

    def say(what: str) -> None:
        held = f", {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB" if device.type == "cuda" else ""
        print(f"{name}, {length} tokens, {time.perf_counter() - begun:.1f} s{held}: {what}", flush=True)

    engine = MegatronEngine(compose(words), layout, device)
    say("built")
    if load is not None:
        engine.load(load)
        say(f"has read {load.name}")
    losses = []
    for step in range(steps):
        result = engine.step(iter([markov(length, 1000 * length + step, 32)]), 1e-2, 1)
        say(f"step {step + 1}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.3f}, skipped {result.skipped}")
        assert not result.skipped and math.isfinite(result.loss)
        losses.append(result.loss)
    if save is not None:
        save.mkdir()
        engine.save(save, {"step": steps})
        say(f"has written {save.name}")
    return losses


def chained(layout: Any, device: torch.device, folder: Path, short: int, long: int, steps: int, precision: str) -> None:
    first = stage(layout, device, "context_8k", short, steps, None, folder / "short", precision)
    second = stage(layout, device, "context_64k", long, 4, folder / "short", None, precision)
    told = f"{short} tokens: {first}; {long} tokens: {second}"
    assert first[-1] < first[0] - 0.7, told
    # nothing is forgotten by the greater length: a new model's loss would be that of the first step
    assert abs(second[0] - first[-1]) < 0.3 * (first[0] - first[-1]), told
    assert second[-1] < second[0] + 0.1, told


@pytest.mark.ops
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_stages_chain_in_one_process(one_rank: Any, tmp_path: Path, precision: str) -> None:
    chained(one_rank, torch.device("cpu"), tmp_path, 128, 512, 12, precision)


@pytest.mark.gpu
def test_eight_thousand_tokens_then_sixty_four_thousand(one_rank: Any, tmp_path: Path) -> None:
    chained(one_rank, torch.device("cuda", 0), tmp_path, 8192, 65536, 16, "bf16")
