"""Steps as they are captured, rehearsed on ranks without a GPU: the same numbers, and nothing that the host would read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.pool import pool

CASES = "tests.engine.capture_cases"
COUNTS = "k3train/model/backend/local.py:grouped_linear"
"""Rows of experts, which a CPU reads and a GPU does not (test_backend_gpu.py)."""
BORDERS = "k3train/engine/megatron.py:_forward"
SPANS = "k3train/engine/megatron.py:spans_of"
"""Document borders, read from the batch before it goes to the device: by a forward that is not captured, and for the bounds
that a graph of context parallelism is chosen by."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "a pipeline": {"pipeline": 2},
    "virtual stages": {"pipeline": 2, "virtual": 2},
    "gradients reduced during the backward": {"data": 2, "overlap_grad_reduce": True},
}


@pytest.mark.parametrize(
    "sizes",
    [
        SCHEDULES["virtual stages"],
        *(pytest.param(sizes, marks=pytest.mark.ops) for sizes in
          (SCHEDULES["a pipeline"], SCHEDULES["gradients reduced during the backward"], {"tensor": 2})),
    ],
    ids=["virtual stages", "a pipeline", "gradients reduced during the backward", "tensor parallelism"],
)  # fmt: skip
def test_a_step_on_fixed_buffers_is_the_step_to_the_last_bit(sizes: dict[str, Any]) -> None:
    """Three steps: launched from Python, captured, replayed. Documents are padded, and their numbers differ."""
    for seen in pool(2).run(f"{CASES}:rehearse", sizes=sizes, overrides={}):
        assert seen["results"] == seen["plain"]
        assert seen["graphs"] == 1
        assert seen["replays"] >= (1 if sizes in SCHEDULES.values() else 4)


CONTEXT = {"train.micro_batch": 1, "train.cuda_graphs": "step"}


@pytest.mark.parametrize(
    ("world", "sizes", "overrides"),
    [
        (2, {"context": 2}, CONTEXT),
        *(pytest.param(*case, marks=pytest.mark.ops) for case in
          ((2, {"context": 2}, {**CONTEXT, "train.recompute": "unit"}),
           (2, {"context": 2}, {**CONTEXT, "train.recompute": "unit", "train.recompute_layers": 4}),
           (4, {"context": 4}, CONTEXT),
           (4, {"context": 2, "tensor": 2}, CONTEXT), (4, {"context": 2, "pipeline": 2}, CONTEXT))),
    ],
    ids=["CP2", "CP2, units computed again", "CP2, one of three units computed again", "CP4", "CP2 TP2", "CP2 PP2"],
)  # fmt: skip
def test_a_context_parallel_step_on_fixed_buffers_is_the_step_to_the_last_bit(
    world: int, sizes: dict[str, Any], overrides: dict[str, Any]
) -> None:
    """A graph for each bound on documents that occurs, the same ones on every rank."""
    ranks = pool(world).run(f"{CASES}:rehearse", sizes=sizes, overrides=overrides, number=4)
    for seen in ranks:
        assert seen["results"] == seen["plain"]
        assert 1 <= seen["graphs"] == ranks[0]["graphs"] <= 4
        assert seen["replays"] == ranks[0]["replays"] >= 1


@pytest.mark.ops
def test_ranks_with_other_documents_agree_on_the_shapes_of_a_graph_that_they_meet_in() -> None:
    """Two pipelines of two stages."""
    sizes = {"pipeline": 2, "data": 2}
    for seen in pool(4).run(f"{CASES}:rehearse", sizes=sizes, overrides={}):
        assert seen["results"] == seen["plain"]
        assert seen["graphs"] == seen["replays"] == 1


@pytest.mark.ops
def test_ranks_with_other_documents_agree_on_bounds_of_them_as_well() -> None:
    """Two streams over two ranks each, whose own bounds differ: other shapes, and the same numbers but for rounding."""
    sizes = {"context": 2, "data": 2, "overlap_grad_reduce": True}
    overrides = {**CONTEXT, "train.seq_length": 64, "train.global_batch": 4}
    ranks = pool(4).run(f"{CASES}:rehearse", sizes=sizes, overrides=overrides, number=4)
    assert any(a != b for a, b in zip(ranks[0]["own"], ranks[-1]["own"]))
    for seen in ranks:
        assert (seen["graphs"], seen["replays"]) == (ranks[0]["graphs"], ranks[0]["replays"])
        assert seen["replays"] >= 1
        for (loss, tokens, norm, load), (plain_loss, plain_tokens, plain_norm, plain_load) in zip(
            seen["results"], seen["plain"]
        ):
            assert (tokens, load) == (plain_tokens, plain_load)
            assert (loss, norm) == pytest.approx((plain_loss, plain_norm), rel=1e-5)


@pytest.mark.parametrize(
    ("sizes", "overrides", "allowed"),
    [
        (SCHEDULES["virtual stages"], {}, {BORDERS}),
        (SCHEDULES["virtual stages"], {"train.cuda_graphs": "step"}, set()),
        (SCHEDULES["gradients reduced during the backward"], {}, {BORDERS}),
        ({"context": 2}, {"train.micro_batch": 1}, {BORDERS}),
        ({"context": 2}, CONTEXT, {SPANS}),
        *(pytest.param(*case, marks=pytest.mark.ops) for case in
          ((SCHEDULES["a pipeline"], {}, {BORDERS}), ({"tensor": 2}, {}, {BORDERS}),
           ({"context": 2}, {"train.micro_batch": 1, "train.recompute": "unit"}, {BORDERS}),
           ({"context": 2}, {**CONTEXT, "train.recompute": "unit"}, {SPANS}))),
    ],
    ids=["virtual stages", "virtual stages, captured", "gradients reduced during the backward", "context parallelism",
         "context parallelism, captured", "a pipeline", "tensor parallelism",
         "context parallelism, units computed again", "context parallelism, captured, units computed again"],
)  # fmt: skip
def test_nothing_between_the_first_forward_and_the_reduced_gradients_reads_the_device(
    sizes: dict[str, Any], overrides: dict[str, Any], allowed: set[str]
) -> None:
    for seen in pool(2).run(f"{CASES}:audited", sizes=sizes, overrides=overrides):
        assert set(seen) - {COUNTS} == allowed, seen


@pytest.mark.ops
def test_the_audit_finds_what_the_sized_exchange_of_experts_reads() -> None:
    for seen in pool(2).run(f"{CASES}:audited", sizes={"expert": 2}, overrides={}):
        assert set(seen) - {COUNTS}, seen
