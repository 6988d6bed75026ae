"""Means and their intervals."""

from __future__ import annotations

import math

import pytest
import torch

from k3data.batch import Batch
from k3train.evaluate.heldout import estimate, sequence_losses
from tests.model.golden_model import build, load_golden


def batch_of(tokens: torch.Tensor, length: int) -> Batch:
    mask = torch.ones(tokens.numel())
    mask[length - 1 :: length] = 0
    cu = torch.arange(0, tokens.numel() + 1, length, dtype=torch.int32)
    return Batch(tokens, tokens.roll(-1), mask, cu, length)


def test_the_interval_covers_the_truth_about_95_percent_of_the_time() -> None:
    torch.manual_seed(0)
    hits = 0
    for _ in range(400):
        weights = torch.randint(1, 20, (60,)).double()
        sums = weights * 2.0 + torch.randn(60).double() * weights.sqrt()
        e = estimate(sums.tolist(), weights.tolist())
        hits += e.low <= 2.0 <= e.high
    assert 0.91 < hits / 400 < 0.98


def test_one_sequence_has_no_interval_and_no_token_is_an_error() -> None:
    assert estimate([3.0], [1.0]).high == math.inf
    with pytest.raises(ValueError, match="no token"):
        estimate([0.0], [0.0])


@pytest.fixture(scope="module")
def model(one_rank, golden):  # type: ignore[no-untyped-def]
    return load_golden(build(one_rank, torch.float32), golden)


def test_sequence_losses_add_up_to_the_mean_loss(model) -> None:  # type: ignore[no-untyped-def]
    tokens = torch.randint(0, 128, (60,), generator=torch.Generator().manual_seed(1))
    sums, counts = sequence_losses(model, [batch_of(tokens, 20)], 20)
    assert counts == [19.0, 19.0, 19.0]
    alone, _ = sequence_losses(model, [batch_of(tokens[20:40], 20)], 20)
    assert alone[0] == pytest.approx(sums[1], rel=1e-5)
