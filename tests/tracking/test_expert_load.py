from __future__ import annotations

import numpy as np
import pytest
import torch

from k3train.tracking.expert_load import (
    ExpertLoadAccumulator,
    load_metrics,
    max_vio,
    max_vio_per_layer,
    relative_load,
    shares,
)

COUNTS = [[4, 4, 4, 4], [8, 4, 4, 0], [16, 0, 0, 0]]


def test_max_vio_is_the_surplus_of_the_most_loaded_expert() -> None:
    assert max_vio_per_layer(COUNTS).tolist() == [0.0, 1.0, 3.0]
    assert max_vio(COUNTS) == 3.0


def test_load_is_relative_to_the_fair_share_and_shares_sum_to_one() -> None:
    assert relative_load(COUNTS)[1].tolist() == [2.0, 1.0, 1.0, 0.0]
    np.testing.assert_allclose(shares(COUNTS).sum(axis=1), 1.0)


@pytest.mark.parametrize(
    "counts",
    [np.asarray(COUNTS), torch.tensor(COUNTS), torch.tensor(COUNTS, dtype=torch.float32, requires_grad=True)],
    ids=["an integer array", "an integer tensor", "a tensor with a gradient"],
)
def test_counts_may_be(counts: object) -> None:
    assert load_metrics(counts) == load_metrics(COUNTS)


def test_a_layer_without_tokens_reads_balanced_rather_than_dividing_by_zero() -> None:
    assert relative_load([[0, 0]]).tolist() == [[1.0, 1.0]]
    assert max_vio([[0, 0]]) == 0.0


def test_a_wrong_shape_is_refused_with_the_shape() -> None:
    with pytest.raises(ValueError, match=r"\(1, 1, 3\)"):
        relative_load(np.ones((1, 1, 3)))


def test_the_accumulator_tells_of_all_micro_batches_and_then_forgets() -> None:
    accumulator = ExpertLoadAccumulator()
    assert accumulator.metrics() == {}
    accumulator.add([[4, 0]])
    accumulator.add([[0, 4]])
    assert accumulator.metrics()["moe/max_vio"] == 0.0
    accumulator.add([[3, 1]])
    assert accumulator.metrics() == {"moe/load": [[1.5, 0.5]], "moe/max_vio": 0.5, "moe/max_vio_per_layer": [0.5]}


def test_the_accumulator_refuses_another_shape() -> None:
    accumulator = ExpertLoadAccumulator()
    accumulator.add([[1, 2]])
    with pytest.raises(ValueError, match="changed shape"):
        accumulator.add([[1, 2, 3]])
