"""A bf16 model keeps A_log, dt_bias, convolutions and o_norm in fp32; both kinds of state survive a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from k3train.engine import plain_state
from tests.engine.resuming import steps, straight_and_resumed
from tests.parallel.tiny import make_engine

BF16 = {"train.precision": "bf16"}


def test_resuming_a_bf16_model_goes_on_bit_for_bit(one_rank: Any, tmp_path: Path) -> None:
    straight, resumed = straight_and_resumed(BF16, tmp_path)
    assert resumed == straight


def test_the_fp32_parameters_stay_fp32_and_move(one_rank: Any) -> None:
    engine = make_engine({}, BF16)
    fp32 = {n: p for m in engine.models for n, p in m.named_parameters() if p.dtype == torch.float32}
    kinds = {n.rsplit(".", 1)[1] for n in fp32}
    assert kinds == {"A_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm"}
    start = {n: p.detach().clone() for n, p in fp32.items()}
    steps(engine, range(1))
    assert all(not torch.equal(start[n], p) for n, p in fp32.items())


class OneArgument(torch.optim.SGD):
    def initialize_state(self, param: torch.Tensor) -> None:
        self.state[param]["exp_avg"] = torch.zeros_like(param)


class TwoArguments(torch.optim.SGD):
    """As transformer-engine's FusedAdam has it."""

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        assert store_param_remainders is False
        self.state[param]["exp_avg"] = torch.zeros_like(param)


@pytest.mark.parametrize("kind", [OneArgument, TwoArguments])
def test_states_are_there_before_a_checkpoint_is_read_whichever_adam_is_in_use(kind: type[torch.optim.SGD]) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    inner = kind(parameters, lr=1.0)
    inner.state[parameters[0]]["exp_avg"] = torch.ones(2)
    plain_state.allocate(SimpleNamespace(optimizer=inner))
    assert [inner.state[p]["exp_avg"].tolist() for p in parameters] == [[1, 1], [0, 0]], "what is there stays"
