"""A bf16 model keeps A_log, dt_bias, convolutions and o_norm in fp32; both kinds of state survive a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

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
