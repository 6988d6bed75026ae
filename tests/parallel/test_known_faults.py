"""Silent faults that megatron-based trainers have had, each with a small test of its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.compare import RELATIVE, differences, distance, norm_of, one_process, train
from tests.parallel.pool import pool

PLAIN = {"distributed_optimizer": False}
TENSOR_EXPERT, PIPELINE_EXPERT = {"tensor": 2, "expert": 4}, {"pipeline": 2, "expert": 2}
NORMS: list[tuple[int, dict[str, Any]]] = [(1, {}), (4, TENSOR_EXPERT), (1, PLAIN), (2, {"expert": 2, **PLAIN})]
FURTHER: list[tuple[int, dict[str, Any]]] = [  # with -m ops; `differences` asks the same of every layout
    (2, {"tensor": 2}), (2, {"expert": 2}), (4, PIPELINE_EXPERT),
    (2, {"tensor": 2, **PLAIN}), (4, {**PIPELINE_EXPERT, **PLAIN}), (4, {**TENSOR_EXPERT, **PLAIN}),
]  # fmt: skip
CASES = [*NORMS, *(pytest.param(*case, marks=pytest.mark.ops) for case in FURTHER)]


@pytest.mark.parametrize(("world", "sizes"), CASES, ids=str)
def test_reported_gradient_norm_counts_every_parameter_once(world: int, sizes: dict[str, Any]) -> None:
    """Experts were once counted per data-parallel rank, and replicated norms once per tensor rank."""
    (step,) = train(world, sizes, steps=1)
    assert abs(step.grad_norm - norm_of(step)) <= RELATIVE * step.grad_norm


@pytest.mark.parametrize("micro", [1, pytest.param(4, marks=pytest.mark.ops), 8])
@pytest.mark.parametrize("world,sizes", [(1, {}), (2, {"context": 2})], ids=["one process", "CP2"])
def test_accumulation_does_not_change_loss_or_gradients(world: int, sizes: dict[str, Any], micro: int) -> None:
    """A mean of means weighs tokens of sparse micro-batches more; here every counted token weighs the same."""
    (got,), (want,) = train(world, sizes, {"train.micro_batch": micro}, steps=1), one_process(steps=1)
    assert got.tokens == want.tokens and abs(got.loss - want.loss) <= RELATIVE * want.loss
    assert all(distance(g, want.gradients[n], want.grad_norm) <= RELATIVE for n, g in got.gradients.items())


def test_documents_make_micro_batches_of_unequal_token_counts() -> None:
    """Otherwise the test above could not tell a mean of means."""
    counts = pool(1).run("tests.parallel.balancing_cases:counted_tokens")[0]
    assert len(set(counts)) > 1


def test_seeds_change_the_model_and_layouts_do_not() -> None:
    assert differences(train(1, {}, steps=1, seed=5), one_process(steps=1))
