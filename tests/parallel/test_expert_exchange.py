"""The exchanges of the experts' rows (`parallel.expert_exchange`) move what megatron's dispatcher moves, and lose nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parallel.compare import differences, one_process, train
from tests.parallel.pool import pool

Case = tuple[int, dict[str, Any], dict[str, Any]]

SLOTS = {"expert_exchange": "slots", "expert_capacity": 8.0}  # room for every row, whatever the routes
SIZED = {"expert_exchange": "sized"}
BESIDE = {"overlap_experts": True}
LAYOUTS: list[Case] = [
    (2, {"expert": 2, **SLOTS, **BESIDE}, {}),
    (2, {"expert": 2, **SIZED, **BESIDE}, {"train.recompute": "selective"}),
    (4, {"tensor": 2, "expert": 2, **SLOTS, **BESIDE}, {}),
]
SLOW: list[Case] = [
    (2, {"expert": 2, **SLOTS}, {"train.recompute": "full"}),
    (4, {"expert": 4, **SLOTS, **BESIDE}, {"train.recompute": "selective"}),
    (4, {"expert": 4, **SIZED}, {}),
    (4, {"tensor": 2, "expert": 4, **SIZED, **BESIDE}, {"train.recompute": "full"}),
    (4, {"expert": 2, "data": 4, **SLOTS, **BESIDE}, {"model.balancing": "aux_loss"}),
    (4, {"pipeline": 2, "virtual": 2, "expert": 2, **SLOTS, **BESIDE}, {}),
    (4, {"context": 2, "expert": 4, **SLOTS, **BESIDE}, {"train.micro_batch": 1}),
    (4, {"tensor": 2, "expert": 4, "overlap_grad_reduce": True, "overlap_param_gather": True, **SLOTS, **BESIDE}, {}),
]


def name(case: Case) -> str:
    world, sizes, overrides = case
    short = {"expert_exchange": "", "overlap_experts": "beside shared experts ", "expert_capacity": ""}
    words = [v if k == "expert_exchange" else short.get(k, f"{k} {v} ") for k, v in sizes.items()]
    return " ".join(
        [f"{world} ranks", *" ".join(words).split(), *(f"{k.split('.')[1]}={v}" for k, v in overrides.items())]
    )


CASES = [*LAYOUTS, *(pytest.param(case, marks=pytest.mark.ops) for case in SLOW)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: name(case))
def test_a_layout_trains_what_one_process_trains(case: Case) -> None:
    world, sizes, overrides = case
    seen = train(world, sizes, overrides)
    assert not differences(seen, one_process({k: v for k, v in overrides.items() if k.startswith("model.")}))


@pytest.mark.parametrize(
    ("kind", "capacity", "poison"), [("sized", 1.0, False), ("slots", 8.0, False), ("slots", 8.0, True)],
    ids=["exact sizes", "slots", "slots whose empty rows are not numbers"],
)  # fmt: skip
@pytest.mark.parametrize("world", [2, 4])
def test_rows_reach_their_experts_and_come_home(kind: str, capacity: float, poison: bool, world: int) -> None:
    ranks = pool(world).run("tests.parallel.exchange_cases:exchange", kind=kind, capacity=capacity, poison=poison)
    for seen in ranks:
        assert not seen["overflowed"]
        for got, wanted in zip(seen["through"], seen["by hand"], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_slots_that_are_too_few_are_told() -> None:
    ranks = pool(2).run("tests.parallel.exchange_cases:exchange", kind="slots", capacity=1.5, poison=False)
    assert [seen["overflowed"] for seen in ranks] == [False, True]  # rank 1 sends everything to rank 0
    assert [seen["rows"] for seen in ranks] == [72, 72]


def test_a_step_whose_slots_were_too_few_is_done_again_and_loses_nothing() -> None:
    """Room for an equal share: some layer of some micro-batch wants more. The same steps through megatron's dispatcher."""
    case = "tests.parallel.exchange_cases:steps"
    exchange = {"expert_exchange": "slots", "expert_capacity": 1.0, "overlap_experts": True}
    slots = pool(2).run(case, sizes={"expert": 2, **exchange})
    megatron = pool(2).run(case, sizes={"expert": 2})
    for got, wanted in zip(slots, megatron, strict=True):
        for a, b in zip(got, wanted, strict=True):
            assert not a["skipped"]
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
            assert a["norm"] == pytest.approx(b["norm"], rel=1e-5)
            assert (a["load"] == b["load"]).all()
            for mine, right in zip(a["biases"], b["biases"], strict=True):
                np.testing.assert_allclose(mine, right, atol=1e-6)
            assert a["extra"]["moe/capacity_wanted"] > 1.0
        assert got[-1]["evaluation"] == pytest.approx(wanted[-1]["evaluation"], rel=1e-6)
    said = slots[0][0]["warned"]
    assert len(said) == 1
    assert "parallel.expert_capacity=" in said[0]


@pytest.mark.parametrize(
    "capacity", [pytest.param(8.0, marks=pytest.mark.ops), 1.0], ids=["room for all", "too few slots"]
)
def test_a_captured_step_with_slots_is_the_step_launched_from_python(capacity: float) -> None:
    """Two ranks see other documents, and replay together all the same."""
    sizes = {"expert": 2, "expert_exchange": "slots", "expert_capacity": capacity, "overlap_experts": True}
    ranks = pool(2).run("tests.engine.capture_cases:rehearse", sizes=sizes, overrides={})
    assert len({(seen["graphs"], seen["replays"]) for seen in ranks}) == 1
    for seen in ranks:
        assert seen["replays"] > 0
        for got, wanted in zip(seen["results"], seen["plain"], strict=True):
            assert got[:3] == pytest.approx(wanted[:3], rel=1e-6)
            assert got[3] == wanted[3]


def test_slots_ask_the_host_for_nothing_that_one_rank_does_not_ask() -> None:
    def audited(exchange: dict[str, Any]) -> Any:
        return pool(2).run("tests.engine.capture_cases:audited", sizes=exchange, overrides={})[0]

    beside = {"expert": 2, "overlap_experts": True}
    slots, sized = audited({**beside, "expert_exchange": "slots"}), audited({**beside, "expert_exchange": "sized"})
    assert slots == audited({})
    assert any("expert_exchange.py" in place for place in sized - slots)
