"""Where documents and ranks meet, counted token by token."""

from __future__ import annotations

import random

import pytest

from k3train.errors import LayoutError
from k3train.parallel.context import merge
from k3train.parallel.slices import Spans, cut, own_block, query_block, rounded_up, spans, swap_pays, swapped_blocks


def random_bounds(seed: int, total: int) -> list[int]:
    rng = random.Random(seed)
    return sorted([0, total, *[rng.randint(0, total) for _ in range(rng.randint(0, total))]])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_slices_agree_with_a_token_by_token_count(size: int, seed: int) -> None:
    total = size * (1 + seed % 9)
    bounds = random_bounds(seed, total)
    ids = [sum(b <= t for b in bounds) for t in range(total)]
    length = total // size
    slices = [cut(bounds, size, r) for r in range(size)]
    for part in slices:
        local = ids[part.start : part.start + length]
        assert part.pieces == (0, *[i for i in range(1, length) if local[i] != local[i - 1]], length)
        first_owner = ids.index(local[0]) // length
        last_owner = (total - 1 - ids[::-1].index(local[-1])) // length
        assert (part.first_source, part.last_reader) == (first_owner, last_owner)
        assert part.continues == (part.rank > 0 and ids[part.start - 1] == local[0])
        kept = min(3, length)
        for back, place in zip((3, 2, 1), part.history(3)):
            position = part.start - back
            same = position >= 0 and ids[position] == local[0]
            assert (place >= 0) == same
            if same:
                owner, inside = divmod(place, kept)
                assert owner * length + length - kept + inside == position
    assert {s.crossed for s in slices} == {any(s.continues for s in slices)}


@pytest.mark.parametrize("seed", range(10))
def test_query_blocks_see_exactly_the_earlier_tokens_of_their_document(seed: int) -> None:
    bounds = random_bounds(seed, 24)
    ids = [sum(b <= t for b in bounds) for t in range(24)]
    rng = random.Random(seed)
    first = rng.randint(0, 23)
    block = query_block(bounds, first, rng.randint(first + 1, 24))
    seen = {t: set(range(k, t + 1)) for a, b, k in block.pieces for t in range(a, b)}
    want = {t: {j for j in range(t + 1) if ids[j] == ids[t]} for t in range(block.first, block.last)}
    assert seen == want
    assert block.pairs == sum(len(s) for s in want.values())


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 2, 5, 64])
def test_swapped_halves_cover_every_row_once_and_balance_a_long_document(size: int, length: int) -> None:
    total = size * length
    blocks = [swapped_blocks([0, total], size, r) for r in range(size)]
    rows = sorted(t for per in blocks for b in per for t in range(b.first, b.last))
    assert rows == list(range(total))
    work = [sum(b.pairs for b in per) for per in blocks]
    assert sum(work) == total * (total + 1) // 2
    if length % 2 == 0:
        assert len(set(work)) == 1


@pytest.mark.parametrize("size", [2, 4, 8])
def test_rows_are_traded_for_long_documents_only(size: int) -> None:
    total = 1 << 18
    assert swap_pays([0, total], size)
    assert swap_pays([0, total // 4, total], size)
    assert not swap_pays([0, total // 2, total], 2)
    assert not swap_pays(list(range(0, total + 1, 2048)), size)
    assert not swap_pays([0, *range(1500, total, 2048), total], size)


def test_the_longest_document_alone_may_make_a_trade_pay() -> None:
    """The first half of the stream in short documents, the second in one: the last ranks have all the work."""
    total = 1 << 17
    bounds = [*range(0, total // 2, 1024), total // 2, total]
    assert swap_pays(bounds, 2) and swap_pays(bounds, 4)
    work = [own_block(bounds, 2, r).pairs for r in range(2)]
    assert work[1] > 50 * work[0]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("seed", range(12))
def test_spans_bound_every_document_and_what_it_has_on_either_side_of_a_border(size: int, seed: int) -> None:
    rng = random.Random(seed)
    total = size * rng.choice([1, 7, 64, 4096])
    bounds = sorted([0, total, *[rng.randint(0, total) for _ in range(rng.choice([1, 5, total // 3]))]])
    length, found = total // size, spans(bounds, size)
    slices = [cut(bounds, size, r) for r in range(size)]
    inside = [b - a for a, b in zip(bounds, bounds[1:])]
    assert max(inside) <= found.longest <= total
    if found.border < length:
        for part in slices:
            assert not part.leaves or part.pieces[-1] - part.pieces[-2] <= found.border
            assert not part.continues or part.start - part.document_start <= found.border
            assert part.first_source >= part.rank - 1
    bounded = found.covering(Spans(3, total))
    assert bounded == Spans(max(found.border, 3), total)


def test_few_spans_come_of_many_streams_of_short_documents() -> None:
    """Each pair of bounds is a graph to capture and to keep."""
    rng, total, seen = random.Random(0), 1 << 16, set()
    for _ in range(200):
        cuts = sorted(rng.sample(range(1, total), 32))
        seen.add(spans([0, *cuts, total], 2))
    assert len(seen) <= 6
    assert sum(s.border < total // 2 for s in seen) >= 3


def test_a_stream_whose_rows_are_traded_has_no_bound_at_its_borders() -> None:
    total = 1 << 17
    assert spans([0, total], 2) == Spans(total // 2, total)
    uneven = [*range(0, total // 2, 1024), total // 2, total]  # no document crosses, but one rank has all the work
    assert spans(uneven, 2) == Spans(total // 2, total // 2)


def test_ranges_merge() -> None:
    assert merge([(4, 6), (0, 2), (1, 4), (8, 9)]) == [(0, 6), (8, 9)]


def test_a_stream_that_does_not_divide_is_refused() -> None:
    with pytest.raises(LayoutError, match="10 tokens does not divide over parallel.context=4"):
        cut([0, 10], 4, 0)


@pytest.mark.parametrize(
    ("count", "least", "want"), [(1, 1, 1), (2, 1, 2), (3, 1, 4), (33, 8, 64), (5, 8, 8), (64, 8, 64)]
)
def test_counts_are_rounded_up_to_powers_of_two(count: int, least: int, want: int) -> None:
    assert rounded_up(count, least) == want
