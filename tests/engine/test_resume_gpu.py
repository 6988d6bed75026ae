"""A run on a GPU goes on from its checkpoint: the Adam in use may be another library's there, and steps are captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from k3train.config.compose import compose
from k3train.engine.megatron import MegatronEngine
from tests.train.test_context_extension import markov

WORDS = [
    "model=k3_tiny", "model.backend=torch", "model.vocab_size=512", "train.precision=bf16", "train.seq_length=512",
    "train.micro_batch=1", "train.global_batch=1", "train.cuda_graphs=step",
]  # fmt: skip
LR = 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "words", [["parallel.distributed_optimizer=true"], ["parallel.distributed_optimizer=false"], ["optim=muon"]],
    ids=["distributed optimizer", "whole optimizer", "muon"],
)  # fmt: skip
def test_two_steps_after_a_checkpoint_are_those_of_a_run_without_a_stop(
    words: list[str], one_rank: Any, tmp_path: Path
) -> None:
    def engine() -> MegatronEngine:
        return MegatronEngine(compose([*WORDS, *words]), one_rank, torch.device("cuda", 0))

    def losses(of: MegatronEngine, numbers: range) -> list[float]:
        return [of.step(iter([markov(512, n, 32)]), LR, 1).loss for n in numbers]

    straight = losses(engine(), range(8))
    first = engine()
    losses(first, range(6))
    first.save(tmp_path, {"step": 6})
    second = engine()
    assert second.load(tmp_path) == {"step": 6}
    resumed = losses(second, range(6, 8))
    third = engine()  # with its weights alone
    third.load(tmp_path, optimizer=False)
    forgetful = losses(third, range(6, 8))[1]
    print(words, straight, resumed, forgetful)
    off = [abs(a - b) for a, b in zip(straight[6:], resumed)]
    assert off[0] < 0.05, (straight, resumed)
    assert off[1] < 0.5 * abs(forgetful - straight[7]), "without Adam's moments the second step would be another"
