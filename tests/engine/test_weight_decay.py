"""Weight decay reaches matrices and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from k3train.engine.megatron import has_weight_decay
from tests.parallel import tiny


def _after_a_step(decay: float, name: str) -> tuple[dict[str, torch.Tensor], Any]:
    engine = tiny.make_engine({}, {"optim.weight_decay": decay, "optim.name": name})
    micro = engine.micro_batches(tiny.GLOBAL)
    engine.step(tiny.batches(engine.config, engine.layout, 0, tiny.SEED), 0.01, micro)
    return {n: p.detach().clone() for m in engine.models for n, p in m.named_parameters()}, engine


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_vectors_convolutions_and_decays_of_the_mixer_do_not_shrink(one_rank: Any, name: str) -> None:
    plain, engine = _after_a_step(0.0, name)
    decayed, _ = _after_a_step(10.0, name)
    specs = {n: p for m in engine.models for n, p in m.named_parameters()}
    for key, parameter in specs.items():
        same = torch.equal(plain[key], decayed[key])
        assert same != has_weight_decay(parameter), key
    spared = {key.rpartition(".")[2] for key, p in specs.items() if not has_weight_decay(p)}
    assert {"A_log", "dt_bias", "q_conv", "o_norm"} <= spared
