"""Balancing over ranks: one integer sum, so the same scores give the same bits however the ranks share the tokens."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parallel.pool import pool

CASE = "tests.parallel.balancing_cases:pooled_bias"


@pytest.mark.parametrize(
    ("balancing", "tokens"),
    [
        ("quantile", 509), ("sign", 512),
        *(pytest.param(*case, marks=pytest.mark.ops) for case in [("quantile", 512), ("sign", 509)]),
    ],
    ids=lambda value: {509: "tokens*k not divisible by experts", 512: "divisible"}.get(value, value),
)  # fmt: skip
def test_biases_are_bit_identical_over_data_parallel_sizes_and_micro_batches(balancing: str, tokens: int) -> None:
    results = [
        pool(world).run(CASE, sizes=sizes, balancing=balancing, tokens=tokens, micro_batches=micro)
        for world, sizes, micro in [
            (1, {}, 1), (1, {}, 4), (1, {}, 16), (2, {"data": 2}, 1), (2, {"data": 2}, 4), (4, {"data": 4}, 4),
            (2, {"tensor": 2}, 1), (4, {"tensor": 2, "data": 2}, 4),
        ]
    ]  # fmt: skip
    want = results[0][0]
    assert int(want["load"].sum()) == tokens * 2 and float(np.abs(want["bias"]).max()) > 0
    for ranks in results:
        for seen in ranks:
            assert np.array_equal(seen["load"], want["load"]) and np.array_equal(seen["bias"], want["bias"])


@pytest.mark.parametrize(
    "world,sizes", [(1, {}), (2, {"tensor": 2}), (2, {"data": 2})], ids=["one process", "TP2", "DP2"]
)
def test_padding_is_not_counted_by_a_training_step(world: int, sizes: dict[str, int]) -> None:
    """A quarter of each micro-batch is marked as padding; load and counts hold the rest, on every layout alike."""
    (want,) = pool(1).run("tests.parallel.balancing_cases:step_with_padding", sizes={})
    for seen in pool(world).run("tests.parallel.balancing_cases:step_with_padding", sizes=sizes):
        assert (seen["load"].sum(1) == seen["valid"] * 2).all()
        assert np.array_equal(seen["load"], want["load"])
        assert all(np.abs(a - b).max() < 1e-6 for a, b in zip(seen["biases"], want["biases"], strict=True))


def test_evaluation_counts_nothing_and_moves_no_bias() -> None:
    for seen in pool(2).run("tests.parallel.balancing_cases:evaluation_leaves_biases", sizes={"data": 2}):
        assert seen == {"counted": 0, "moved": 0}
