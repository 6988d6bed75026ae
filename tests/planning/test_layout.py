"""Memory, time and the layout that parallel=auto proposes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

from k3train.config import checks
from k3train.config.compose import compose
from k3train.config.schema import Config
from k3train.errors import LayoutError
from k3train.planning import command, layout, memory, parameters, time


@functools.cache
def base(*overrides: str) -> Config:
    return compose(list(overrides))


def changed(config: Config, **values: Any) -> Config:
    """A copy with keys set, written section__key."""
    copied = copy.deepcopy(config)
    for key, value in values.items():
        section, _, name = key.partition("__")
        setattr(getattr(copied, section), name, value)
    return copied


PROXY = ("experiment=k3_proxy",)
LONG = (
    "model=k3_proxy", "train.seq_length=65536", "train.micro_batch=1", "train.global_batch=2", "train.recompute=unit",
)  # fmt: skip


def test_weights_of_one_rank_are_all_parameters() -> None:
    held = memory.rank_parameters(base(*PROXY), 1)
    assert held.dense + held.experts == pytest.approx(parameters.count(base(*PROXY).model).total)


def test_one_rank_pays_two_four_and_twelve_bytes_a_parameter_with_adam() -> None:
    used = memory.estimate(changed(base(*PROXY), optim__name="adamw"), 1)
    total = parameters.count(base(*PROXY).model).total
    assert (used.weights, used.gradients, used.optimizer) == pytest.approx((2 * total, 4 * total, 12 * total))


@pytest.mark.parametrize(
    ("sizes", "world", "part", "share"),
    [
        ({"parallel__data": 4}, 4, "optimizer", 1 / 4),
        ({"parallel__data": 4}, 4, "weights", 1.0),
        ({"parallel__expert": 4, "parallel__data": 4}, 4, "optimizer", 1 / 4),
    ],
)
def test_ranks_share_what_the_layout_splits(sizes: dict[str, int], world: int, part: str, share: float) -> None:
    alone = getattr(memory.estimate(base(*PROXY), 1), part)
    assert getattr(memory.estimate(changed(base(*PROXY), **sizes), world), part) == pytest.approx(share * alone)


def test_expert_parallelism_splits_experts_alone() -> None:
    one, four = (memory.rank_parameters(changed(base(*PROXY), parallel__expert=n), 4) for n in (1, 4))
    assert four.experts == one.experts / 4 and four.dense == one.dense


def test_recomputation_and_shorter_streams_hold_less() -> None:
    sizes = [memory.activations(changed(base(*PROXY), train__recompute=r)) for r in ("none", "selective", "full")]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
    fp8 = base(*PROXY, "train.activations.units=fp8", "train.activations.gates=fp8")
    assert memory.activations(fp8) < sizes[1] < sizes[0], "copies of a byte take less than two of three whole tensors"
    half = memory.activations(changed(base(*PROXY), train__seq_length=2048))
    assert half == pytest.approx(memory.activations(base(*PROXY)) / 2)


def test_fewer_layers_computed_again_hold_more_and_take_less_time() -> None:
    unit = changed(base(*PROXY), train__recompute="unit")
    trials = [
        unit,
        *(changed(unit, train__recompute_layers=n) for n in (13, 12, 8, 4)),
        changed(unit, train__recompute="none"),
    ]
    held = [memory.activations(trial) for trial in trials]
    assert held == sorted(held) and held[1] == held[0] and held[3] < held[4] < held[5]
    assert held[2] == held[0], "the last unit, of one layer, has gone before the fullest unit is made again"
    each = held[5] / 13
    assert held[3] - held[0] < 1.5 * each, "one layer more than the unit that is made again"
    seconds = [time.estimate(trial, 1).recompute for trial in trials]
    assert seconds == pytest.approx([seconds[0] * n / 13 for n in (13, 13, 12, 8, 4, 0)])


def test_stages_behind_the_last_recomputed_layer_compute_nothing_again() -> None:
    staged = changed(base(*PROXY), train__recompute="unit", parallel__pipeline=2, optim__name="adamw")
    fewer = changed(staged, train__recompute_layers=4)
    none = changed(staged, train__recompute="none")
    first, last = memory.layers_of_rank(staged, 0), memory.layers_of_rank(staged, 1)
    assert first[-1] >= 4 and last[0] > 4
    assert memory.activations(fewer, rank=1) == memory.activations(none, rank=1)
    assert memory.activations(staged, rank=0) < memory.activations(fewer, rank=0) < memory.activations(none, rank=0)
    slowest = 4 / len(first)
    assert time.estimate(fewer, 2).recompute == pytest.approx(slowest * time.estimate(staged, 2).recompute)


def test_keys_of_the_whole_stream_count_while_a_recomputed_region_walks_back() -> None:
    """Under context parallelism, and with their gradients: where layers are kept, the attention expands them by itself."""
    long = changed(base(*PROXY), train__recompute="unit", parallel__context=2, optim__name="adamw")
    half = changed(long, parallel__context=1, train__seq_length=long.train.seq_length // 2)
    mla = long.model.mla
    keys = mla.heads * (mla.nope_dim + mla.shared_dim + mla.v_dim)
    more = memory.activations(long) - memory.activations(half)
    assert more == pytest.approx(memory.stream_tokens(long) * 2 * 3 * keys)
    assert memory.activations(changed(long, train__recompute="none")) == memory.activations(
        changed(half, train__recompute="none")
    )


def test_the_plan_names_the_fewest_layers_to_compute_again(capsys: pytest.CaptureFixture[str]) -> None:
    long = base(*LONG)
    less = layout.less_recomputed(long, 1)
    assert less is not None and less.config.train.recompute_layers == 8
    checks.check(less.config, 1)
    assert less.seconds < time.estimate(long, 1).total and less.gigabytes > memory.estimate(long, 1).total / 1e9
    assert layout.less_recomputed(less.config, 1) is None
    assert base(*LONG, "train.recompute_layers=8").train == less.config.train, "it can be typed"
    short = layout.less_recomputed(changed(long, train__seq_length=4096), 1)
    assert short is not None and short.config.train.recompute == "none"
    command.plan(long)
    assert "`train.recompute_layers=8` fits too" in capsys.readouterr().out


def test_slots_of_the_experts_exchange_take_their_capacity_and_never_more_than_the_worst_case() -> None:
    def held(**values: object) -> float:
        return memory.activations(changed(base(*PROXY), parallel__expert=2, **values))

    exact, slots = held(), held(parallel__expert_exchange="slots", parallel__expert_capacity=1.5)
    worst = held(parallel__expert_exchange="slots", parallel__expert_capacity=2.0)
    assert exact < slots < worst
    assert worst == held(parallel__expert_exchange="slots", parallel__expert_capacity=9.0)


def test_compute_time_is_flops_over_the_assumed_speed_and_shrinks_with_ranks() -> None:
    config = base(*PROXY)
    one = time.estimate(config, 1)
    assert one.total == one.compute
    assert time.estimate(changed(config, parallel__data=8), 8).compute == pytest.approx(one.compute / 8)


def test_a_pipeline_has_a_bubble_that_virtual_stages_shrink() -> None:
    plain = time.estimate(changed(base(*PROXY), parallel__pipeline=4), 4).bubble
    virtual = time.estimate(changed(base(*PROXY), parallel__pipeline=4, parallel__virtual=2), 4).bubble
    assert virtual == pytest.approx(plain / 2) and plain > 0


@pytest.mark.parametrize("world", [1, 2, 8, 64])
def test_every_candidate_passes_the_checks_and_fits(world: int) -> None:
    found = layout.candidates(base(*PROXY), world, 141.0)
    assert found
    for candidate in found:
        checks.check(candidate.config, world)
        assert candidate.gigabytes <= layout.FILL * 141.0
    fastest = min(c.seconds for c in found)
    assert found[0].seconds <= (1 + layout.NEAR) * fastest
    slower = [c.seconds for c in found if c.seconds > (1 + layout.NEAR) * fastest]
    assert slower == sorted(slower)


def test_auto_names_its_choice_its_reason_and_its_assumptions() -> None:
    resolved, why = layout.resolve_auto(changed(base(*PROXY), parallel__auto=True, parallel__world=8))
    assert not resolved.parallel.auto and checks.ranks(resolved) == 8
    assert "parallel.auto on 8 ranks" in why and "assumed, not measured" in why


def test_auto_of_a_tiny_model_on_one_rank_stays_on_one_rank() -> None:
    resolved, _ = layout.resolve_auto(changed(base(), parallel__auto=True), 1)
    assert checks.ranks(resolved) == 1


def test_auto_of_a_tiny_model_on_two_ranks_splits_the_batch() -> None:
    resolved, _ = layout.resolve_auto(changed(base(), parallel__auto=True), 2)
    assert (resolved.parallel.data, resolved.parallel.tensor, resolved.parallel.pipeline) == (2, 1, 1)


def test_what_cannot_fit_is_refused_with_the_smallest_layout() -> None:
    huge = changed(base("model=k3", "cluster=slurm"), parallel__auto=True, parallel__world=8)
    with pytest.raises(LayoutError, match="larger parallel.world"):
        layout.resolve_auto(huge)


def test_the_templates_of_conf_fit_their_clusters() -> None:
    for name in ("k3", "k3_proxy"):
        config = base(f"experiment={name}")
        world = command._world(config)
        assert memory.estimate(config, world).total / 1e9 <= layout.FILL * config.cluster.gpu_memory_gb, name


def test_plan_prints_parameters_flops_memory_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.plan(base("model=k3")) == 0
    out = capsys.readouterr().out
    for words in ("2,779,484,476,000", "2,779.48 B", "104.19 B", "3 x forward", "does not fit", "seconds a step"):
        assert words in out


def test_plan_of_auto_shows_the_proposal(capsys: pytest.CaptureFixture[str]) -> None:
    command.plan(changed(base(*PROXY), parallel__auto=True, parallel__world=8))
    assert "parallel.auto on 8 ranks" in capsys.readouterr().out
