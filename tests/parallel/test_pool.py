"""The pool itself: results in rank order, the first error on top, a hang ends in time, and the pool lives on."""

from __future__ import annotations

import time

import pytest

from tests.parallel.pool import CaseFailed, pool

HERE = "tests.parallel.pool_cases"


def test_every_rank_answers_in_rank_order() -> None:
    assert pool(2).run(f"{HERE}:add_ranks", offset=10) == [(0, 21), (1, 21)]


def test_a_failing_rank_brings_the_others_down_with_its_error_on_top() -> None:
    begin = time.monotonic()
    with pytest.raises(CaseFailed, match=r"rank 1 of 2 failed[^$]*wrong on purpose[^$]*rank 0 of 2") as failure:
        pool(2).run(f"{HERE}:fail_on", rank=1)
    assert failure.value.first == 1
    assert time.monotonic() - begin < 20
    assert pool(2).run(f"{HERE}:add_ranks", offset=0) == [(0, 1), (1, 1)]


def test_a_killed_rank_is_reported() -> None:
    with pytest.raises(CaseFailed, match="rank 0 of 2 failed[^$]*the process is gone"):
        pool(2).run(f"{HERE}:die_on", rank=0)


def test_a_hang_ends_with_the_stack_of_every_rank() -> None:
    with pytest.raises(CaseFailed, match="still in .*pool_cases:hang[^$]*File .*pool_cases.py") as failure:
        pool(2).run(f"{HERE}:hang", timeout=2.0)
    assert failure.value.first == -1
    assert pool(2).run(f"{HERE}:add_ranks", offset=0) == [(0, 1), (1, 1)]
