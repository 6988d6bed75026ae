"""What crosses pipeline borders: sizes against a brute-force count, bytes against the closed form, memory freed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from k3train.errors import LayoutError
from k3train.model.attention_residuals import source_ends_before, tensors_before_layer
from k3train.model.build import layer_costs, stage_borders
from k3train.parallel.layout import Sizes
from k3train.parallel.pipeline import split_layers
from k3train.parallel.transport import Borders, borders
from tests.parallel.compare import differences, one_process, train
from tests.parallel.pool import pool
from tests.parallel.tiny import MICRO, SEQUENCE, tiny_model


def table(layers: int, block: int, pipeline: int, virtual: int, transport: str, mode: str = "block") -> Borders:
    return borders(
        split_layers(layers, pipeline * virtual), pipeline, transport,
        lambda n: tensors_before_layer(mode, n, block), lambda n: source_ends_before(mode, n, block),
    )  # fmt: skip


def sources_in_front(mode: str, layer: int, block: int) -> tuple[set[str], set[str]]:
    """Names of the finished sources in front of a layer, and of the running sum (finished or not)."""
    if mode == "off":
        return set(), {f"sum{layer}"}
    finished, running = [], "embedding"
    for i in range(layer):
        if mode == "full":
            finished += [running, f"attention{i}"]
            running = f"mlp{i}"
        else:
            if i % block == 0:
                finished.append(running)
                running = f"block{i // block}"
    whole = mode == "full" or layer % block == 0
    return set(finished), {running if whole else f"{running} up to {layer}"}


@pytest.mark.parametrize("mode", ["block", "full", "off"])
@pytest.mark.parametrize("layers,block", [(9, 4), (93, 12), (16, 3)])
@pytest.mark.parametrize("pipeline,virtual", [(2, 1), (2, 4), (4, 2), (8, 1), (3, 3)])
def test_cached_transfers_are_what_the_receiver_lacks(
    mode: str, layers: int, block: int, pipeline: int, virtual: int
) -> None:
    """Brute force: follow the set of finished sources that each rank has seen."""
    if pipeline * virtual > layers:
        pytest.skip("more stages than layers")
    ranges = split_layers(layers, pipeline * virtual)
    t = table(layers, block, pipeline, virtual, "cached", mode)
    seen: dict[int, set[str]] = {r: set() for r in range(pipeline)}
    for stage, (first, last) in enumerate(ranges):
        finished, running = sources_in_front(mode, first, block)
        if stage > 0:
            lacking = finished - seen[stage % pipeline]
            assert t.received(stage) == len(lacking) + len(running), stage
            assert t.bytes_received(stage, 10, 7, 2) == 10 * 7 * 2 * (len(lacking) + 1)
        after, sum_after = sources_in_front(mode, last, block)
        final = {n for n in sum_after if "up to" not in n} if mode != "off" else set()
        seen[stage % pipeline] |= finished | after | final


def test_the_cache_sends_less_and_padding_sends_one_size() -> None:
    cached, padded = table(93, 12, 8, 4, "cached"), table(93, 12, 8, 4, "padded")
    assert len({padded.received(s) for s in range(1, 32)}) == 1
    total = [sum(t.received(s) for s in range(1, 32)) for t in (cached, padded)]
    assert total[0] < 0.5 * total[1]
    # without virtual stages no rank has an earlier chunk, and a border carries all there is, without padding
    firsts = [first for first, _ in split_layers(9, 4)]
    plain = table(9, 4, 4, 1, "cached")
    assert [plain.received(s) for s in range(1, 4)] == [tensors_before_layer("block", n, 4) for n in firsts[1:]]


def test_an_unknown_transport_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="parallel.transport='telepathy'"):
        table(9, 4, 2, 1, "telepathy")


@pytest.mark.parametrize(
    ("world", "pipeline", "virtual", "transport"),
    [
        (2, 2, 1, "cached"), (2, 2, 2, "cached"), (4, 4, 2, "cached"), (2, 2, 4, "padded"),
        *(pytest.param(*case, marks=pytest.mark.ops) for case in
          [(2, 2, 4, "cached"), (2, 2, 1, "padded"), (2, 2, 2, "padded"), (4, 4, 2, "padded")]),
    ],
)  # fmt: skip
def test_bytes_of_every_transfer_follow_the_closed_form(
    world: int, pipeline: int, virtual: int, transport: str
) -> None:
    sizes = {"pipeline": pipeline, "virtual": virtual, "transport": transport}
    ranks = pool(world).run("tests.parallel.transport_cases:one_step", sizes=sizes)
    t = stage_borders(tiny_model(), Sizes(world, pipeline=pipeline, virtual=virtual), None, transport)
    one = {s: t.bytes_received(s, MICRO * SEQUENCE, 32, 4) for s in range(t.stages)}
    for rank, seen in enumerate(ranks):
        mine = [v * pipeline + rank for v in range(virtual)]
        assert seen["finished"] and seen["micro_batches"] == 4
        assert sorted(seen["sent"]["forward"]) == sorted(one[s + 1] for s in mine if s + 1 < t.stages for _ in range(4))
        assert sorted(seen["sent"]["backward"]) == sorted(one[s] for s in mine if s > 0 for _ in range(4))


def test_kept_sources_live_as_long_as_their_micro_batch() -> None:
    """Sixteen micro-batches: leaves of the oldest are gone while the last are made, and all are gone at the end."""
    sizes, overrides = {"pipeline": 2, "virtual": 2}, {"train.global_batch": 32}
    for seen in pool(2).run("tests.parallel.transport_cases:kept_leaves", sizes=sizes, overrides=overrides):
        assert seen["made"] == 16 and seen["left"] == 0 and seen["queued"] == 0
        assert 0 < seen["most"] <= 6


def test_a_sent_tensor_gives_its_memory_back_when_the_next_one_leaves() -> None:
    """Eight sends a rank at least, of which many wait for their gradient at once."""
    for seen in pool(2).run("tests.parallel.transport_cases:sent_tensors", sizes={"pipeline": 2, "virtual": 2}):
        assert seen["made"] >= 4 and seen["most"] <= 2 and seen["left"] == 0, seen


def test_evaluation_leaves_nothing_behind() -> None:
    sizes = {"pipeline": 2, "virtual": 2}
    losses = pool(2).run("tests.parallel.transport_cases:evaluate", sizes=sizes)
    (want,) = pool(1).run("tests.parallel.transport_cases:evaluate", sizes={})
    for seen in losses:
        assert seen["tokens"] == want["tokens"] and abs(seen["loss"] - want["loss"]) <= 1e-6 * want["loss"]
        assert seen["queued"] == 0 and seen["counted"] == 0


def test_gradients_of_kept_sources_matter() -> None:
    """Without the join the gradients are wrong: the layout tests would see a lost one."""
    seen = train(2, {"pipeline": 2, "virtual": 2}, steps=1, sabotage="join")
    assert differences(seen, one_process(steps=1))


def test_virtual_stages_refuse_batched_transfers() -> None:
    message: list[Any] = pool(2).run("tests.parallel.transport_cases:batched", sizes={"pipeline": 2, "virtual": 2})
    assert all("silently wrong" in m for m in message)


def test_layers_are_split_by_their_cost() -> None:
    """A wide head takes the work of layers, so the last stage gets fewer of them; a given layout is left alone."""
    model = tiny_model()
    model.vocab_size = 4096
    costs = layer_costs(model)
    ranges = split_layers(9, 3, None, costs)
    loads = [sum(costs[first:last]) for first, last in ranges]
    assert ranges[-1][1] - ranges[-1][0] < 3 and max(loads) < max(sum(costs[i : i + 3]) for i in (0, 3, 6))
    assert split_layers(9, 3, "E K K K|F K K|K F F L", costs) == [(0, 3), (3, 6), (6, 9)]


@pytest.mark.parametrize(("layers", "pipeline", "virtual"), [(7, 2, 2), (8, 2, 3), (8, 3, 2), (9, 4, 2), (6, 2, 1)])
def test_even_stages_minimise_the_time_of_ranks_that_run_one_chunk_each_at_once(
    layers: int, pipeline: int, virtual: int
) -> None:
    """Against every split there is, of costs that differ."""
    costs = [float((7 * i * i) % 11 + 1) for i in range(layers)]
    stages = pipeline * virtual

    def time(ranges: list[tuple[int, int]]) -> float:
        loads = [sum(costs[a:b]) for a, b in ranges]
        return sum(max(loads[v * pipeline : (v + 1) * pipeline]) for v in range(virtual))

    every = [[0, *cuts, layers] for cuts in itertools.combinations(range(1, layers), stages - 1)]
    fastest = min(time(list(zip(ends, ends[1:]))) for ends in every)
    ranges = split_layers(layers, stages, "even", costs, pipeline=pipeline)
    assert [a for a, _ in ranges] + [layers] == [0] + [b for _, b in ranges]
    assert all(a < b for a, b in ranges)
    assert time(ranges) == fastest


def test_costs_add_up_to_the_weights_that_a_token_passes_through() -> None:
    from k3train.planning.parameters import count

    model = tiny_model()
    parts = count(model)
    vectors = parts.attention_residuals + parts.norms
    assert 0 <= parts.active - vectors - sum(layer_costs(model)) < 0.05 * parts.active
