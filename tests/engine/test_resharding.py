"""Checkpoints written under one layout and read under another, optimizer state included: the run goes on as if uncut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.assemble import assemble
from tests.parallel.compare import RELATIVE, differences, one_process
from tests.parallel.pool import pool

CHAIN: list[tuple[int, dict[str, Any]]] = [
    (4, {"tensor": 2, "pipeline": 2}),
    (4, {"data": 4}),
    (4, {"context": 2, "expert": 2}),
    (4, {"pipeline": 2, "virtual": 2, "expert": 2}),
    (1, {}),
]


@pytest.mark.ops
def test_a_run_that_changes_its_layout_every_step_is_the_run_of_one_process(tmp_path: Path) -> None:
    """One step under each layout, through a checkpoint; weights, both moments, step counts and biases travel."""
    want = one_process(steps=len(CHAIN))
    before: str | None = None
    for step, (world, sizes) in enumerate(CHAIN):
        after = tmp_path / f"step{step}"
        after.mkdir()
        case = "tests.engine.reshard_cases:continue_run"
        seen = assemble(pool(world).run(case, sizes=sizes, load=before, save=str(after), step=step))
        wrong = differences(seen, want[step : step + 1])
        assert not wrong, (sizes, wrong)
        before = str(after)


def test_the_momentum_of_muon_reshards(tmp_path: Path) -> None:
    """Heads and whole matrices cut over tensor ranks, work shared over data-parallel ranks, one process."""
    muon = {"optim.name": "muon", "optim.muon.ns_dtype": "fp32", "optim.lr": 1e-3}
    want = one_process(muon)
    before: str | None = None
    for step, (world, sizes) in enumerate([(2, {"tensor": 2}), (2, {"data": 2}), (1, {})]):
        after = tmp_path / f"step{step}"
        after.mkdir()
        case = "tests.engine.reshard_cases:continue_run"
        ranks = pool(world).run(case, sizes=sizes, load=before, save=str(after), step=step, overrides=muon)
        assert not differences(assemble(ranks), want[step : step + 1])
        before = str(after)


@pytest.mark.parametrize("distributed", [True, False], ids=["sharded optimizer", "plain optimizer"])
def test_evaluation_after_a_load_gives_the_loss_before_the_save(tmp_path: Path, distributed: bool) -> None:
    (tmp_path / "saved").mkdir()
    case = "tests.engine.reshard_cases:loss_after"
    sizes = {"distributed_optimizer": distributed}
    (want,) = pool(1).run(case, sizes=sizes, load=None, save=str(tmp_path / "saved"))
    for got in pool(2).run(case, sizes={"pipeline": 2, **sizes}, load=str(tmp_path / "saved"), save=None):
        assert abs(got - want) <= RELATIVE * want


def test_moments_matter(tmp_path: Path) -> None:
    """Loading weights alone makes another second step: the chain above would notice lost optimizer state."""
    (tmp_path / "saved").mkdir()
    case = "tests.engine.reshard_cases:continue_run"
    pool(1).run(case, sizes={}, load=None, save=str(tmp_path / "saved"), step=0)
    want = one_process(steps=len(CHAIN))
    ranks = pool(2).run(
        case, sizes={"data": 2}, load=str(tmp_path / "saved"), save=None, step=1, steps=2, optimizer=False
    )
    assert differences(assemble(ranks), want[1:3])
