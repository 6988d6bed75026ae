"""Layers on slices of a stream equal the same layers on the whole stream, wherever documents begin and end."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from k3train.parallel.slices import spans
from tests.parallel.pool import pool

CASES = "tests.parallel.context_cases"


def random_streams(world: int, count: int) -> list[list[int]]:
    rng = random.Random(world)
    streams = []
    for _ in range(count):
        total = world * rng.randint(1, 12)
        streams.append(sorted([0, total, *rng.sample(range(total + 1), rng.randint(0, min(5, total)))]))
    return streams


def streams(world: int) -> dict[str, list[list[int]]]:
    """Document borders by what is hard about them; slices of 8 tokens unless said otherwise."""
    total = 8 * world
    borders = list(range(0, total + 1, 8))
    return {
        "one document over all ranks": [[0, total]],
        "every token its own document": [list(range(total + 1))],
        "documents end exactly at the rank borders": [borders],
        "a document begins one token before each rank border": [[0, *[b - 1 for b in borders[1:]], total]],
        "a document begins one token after each rank border": [[0, *[b + 1 for b in borders[:-1]], total]],
        "a document of one token on each side of the border": [[0, 7, 8, 9, total]],
        "a document leaves from the middle of the first rank to the middle of the last": [[0, 3, total - 3, total]],
        "empty documents at borders and inside": [[0, 0, 5, 5, 8, 8, 8, total, total]],
        "slices of two tokens, shorter than the convolution": [[0, 2 * world], [0, 1, 2 * world], [0, 3, 2 * world]],
        "slices of one token": [[0, world], [0, 1, world]],
        "several chunks a rank": [[0, 70 * world], [0, 33, 70 * world]],
        "documents reach little over borders": [
            [0, 6, *(8 * r + at for r in range(1, world) for at in (2, 6)), total],
            [0, 7, *range(8, total, 8), total],
            [0, 5, *range(12, total, 8), total],
            [0, 60, *(64 * r + at for r in range(1, world) for at in (3, 35, 61)), 64 * world],
        ],
        "random documents": random_streams(world, 8),
    }


@functools.cache
def deviations(world: int, kind: str, bound: float | None, way: str) -> dict[str, dict[str, float]]:
    """All streams in one visit to the ranks."""
    case = {"kind": kind, "streams": streams(world), "bound": bound, **WAYS[way]}
    results = pool(world).run(f"{CASES}:deviations", **case, timeout=120.0)
    return results[0]


NEVER = 1 << 40
WAYS: dict[str, dict[str, Any]] = {
    "documents on the host, rows traded": {"row_pairs": 0},
    "documents on the host, rows kept": {"row_pairs": NEVER},
    "documents on the device": {"on_device": True},
    "documents on the device, bounded": {"on_device": True, "bounded": True, "row_pairs": NEVER},
}


@pytest.mark.parametrize("world", [2, 4])
def test_some_of_the_streams_are_bounded_at_the_borders_of_ranks(world: int) -> None:
    """Else a bounded way would be the one without bounds."""
    found = {
        name: [spans(b, world).border * world < b[-1] for b in several] for name, several in streams(world).items()
    }
    assert all(found["documents reach little over borders"])
    assert not any(found["one document over all ranks"])


@pytest.mark.parametrize("way", [way for way in WAYS if "traded" not in way])
@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("name", list(streams(2)))
@pytest.mark.parametrize("world", [2, 4])
def test_kda_on_slices_is_kda_on_the_stream(world: int, name: str, bound: float | None, way: str) -> None:
    worst = deviations(world, "kda", bound, way)[name]
    assert {n for n, e in worst.items() if not e < 1e-10} == set(), worst


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", list(streams(2)))
@pytest.mark.parametrize("world", [2, 4])
def test_attention_on_slices_is_attention_on_the_stream(world: int, name: str, way: str) -> None:
    worst = deviations(world, "mla", -5.0, way)[name]
    assert {n for n, e in worst.items() if not e < 1e-5} == set(), worst


def test_kda_gathers_one_pair_a_rank_and_attention_gathers_latents() -> None:
    tail, pair = (3, 3 * 32), (1, 4, 8, 16)  # three inputs of q, k, v; M and S of four heads
    for seen in pool(4).run(f"{CASES}:count_exchanges", bounds=[0, 3, 32]):
        assert seen == {"kda": [tail, pair], "kda backward": [pair], "mla": [(8, 12)], "mla backward": [(8, 12)]}


def test_nothing_travels_between_kda_layers_when_no_document_crosses_a_border() -> None:
    for seen in pool(4).run(f"{CASES}:count_exchanges", bounds=[0, 8, 11, 16, 24, 32]):
        assert seen["kda"] == seen["kda backward"] == []


def test_a_short_document_over_a_border_adds_no_work_on_whole_slices() -> None:
    crossing, apart = (pool(2).run(f"{CASES}:kda_backward", bounds=b) for b in ([0, 90, 110, 200], [0, 50, 100, 200]))
    for (work, _), (without, _) in zip(crossing, apart):
        assert work == without
        assert work["silu_backward"] == 3  # what is counted includes what there is to do
        assert not {"add", "add_", "zeros", "slice_backward", "select_backward"} & set(work)


@pytest.mark.parametrize(
    ("bounds", "recompute", "layers", "times"),
    [
        ([0, 75, 200], "none", None, 1),
        ([0, 74, 200], "none", None, 2),
        ([0, 200], "none", None, 2),
        ([0, 200], "selective", None, 2),
        ([0, 200], "unit", None, 1),
        ([0, 200], "full", None, 1),
        ([0, 200], "unit", 8, 1),
        ([0, 200], "unit", 4, 2),
    ],
    ids=[
        "a quarter of the slice",
        "more",
        "all",
        "all, selective",
        "all, in units",
        "all, in full",
        "all, in its unit",
        "all, in a unit that is kept",
    ],
)
def test_a_summary_is_made_again_in_the_backward_where_that_saves_memory(
    bounds: list[int], recompute: str, layers: int | None, times: int
) -> None:
    (_, first), (_, last) = pool(2).run(
        f"{CASES}:kda_backward", bounds=bounds, recompute=recompute, recompute_layers=layers
    )
    assert (first, last) == (times, 0)


def test_attention_work_is_equal_and_no_rank_keeps_the_keys_of_the_stream() -> None:
    length = 64
    results = pool(4).run(f"{CASES}:attention_work", bounds=[0, 4 * length])
    work = [pairs for pairs, _ in results]
    assert sum(work) == 4 * length * (4 * length + 1) // 2
    assert max(work) <= 1.02 * min(work)
    kept = max(largest for _, largest in results)
    assert kept <= length * 4 * 12  # one tensor of this rank's queries: rows x heads x key size


def test_rows_stay_where_even_work_is_not_worth_their_way() -> None:
    length = 64
    results = pool(4).run(f"{CASES}:attention_work", bounds=[0, 4 * length], row_pairs=1000)
    assert [pairs for pairs, _ in results] == [length * length * r + length * (length + 1) // 2 for r in range(4)]


def test_forward_without_gradients_is_the_same() -> None:
    assert max(pool(2).run(f"{CASES}:without_gradients", bounds=[0, 5, 16])) == 0.0
