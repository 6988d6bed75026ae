"""Schedules as functions of the step."""

from __future__ import annotations

import math

import pytest

from k3train.config.schema import ScheduleConfig
from k3train.errors import ConfigError
from k3train.train.schedule import consumed_samples, global_batch, learning_rate


def test_one_percent_of_warmup_rises_linearly_to_the_peak() -> None:
    rates = [learning_rate(s, 1000, 2.0, ScheduleConfig()) for s in range(11)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(2.0)


def test_cosine_ends_at_the_floor_and_is_half_way_in_the_middle() -> None:
    schedule = ScheduleConfig(warmup_fraction=0.0, min_lr_ratio=0.1)
    assert learning_rate(500, 1000, 1.0, schedule) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert learning_rate(999, 1000, 1.0, schedule) == pytest.approx(0.1, abs=1e-4)


def test_wsd_holds_the_peak_then_falls() -> None:
    schedule = ScheduleConfig(kind="wsd", warmup_fraction=0.0, min_lr_ratio=0.0, decay_fraction=0.2)
    assert learning_rate(799, 1000, 1.0, schedule) == 1.0
    assert learning_rate(900, 1000, 1.0, schedule) == pytest.approx(0.5)


def test_linear_falls_all_the_way() -> None:
    schedule = ScheduleConfig(kind="linear", warmup_fraction=0.0, min_lr_ratio=0.5)
    assert learning_rate(500, 1000, 1.0, schedule) == pytest.approx(0.75)


def test_batch_ramp_grows_to_the_full_batch_and_counts_what_was_consumed() -> None:
    sizes = [global_batch(s, 32, "8:8:2") for s in range(10)]
    assert sizes == [8, 8, 16, 16, 24, 24, 32, 32, 32, 32]
    assert consumed_samples(7, 32, "8:8:2") == sum(sizes[:7])
    assert consumed_samples(7, 32, None) == 224


@pytest.mark.parametrize("ramp", ["8", "8:x:2", "0:8:2", "64:8:2"])
def test_a_bad_ramp_is_refused(ramp: str) -> None:
    with pytest.raises(ConfigError, match="batch_ramp"):
        global_batch(0, 32, ramp)
