"""Per-head Muon moves the weights alike under every layout: three steps in fp32, Newton-Schulz in fp32.

The distributed optimizer is asked for, as by default: under Muon ranks keep whole states, and share the work instead.
Every gradient and every parameter of every step is compared, to 1e-5 of its own length.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.compare import differences, one_process, train

MUON = {"optim.name": "muon", "optim.muon.ns_dtype": "fp32", "optim.lr": 1e-3}
Case = tuple[int, dict[str, Any]]
LAYOUTS: list[Case] = [(2, {"tensor": 2}), (2, {"data": 2}), (2, {"pipeline": 2}), (4, {"tensor": 2, "expert": 2})]
FURTHER: list[Case] = [(2, {"expert": 2}), (2, {"context": 2}), (4, {"data": 4})]  # with -m ops
CASES = [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.ops) for case in FURTHER)]


@pytest.mark.parametrize(("world", "sizes"), CASES, ids=str)
def test_the_update_is_that_of_one_process(world: int, sizes: dict[str, Any]) -> None:
    assert not differences(train(world, sizes, MUON), one_process(MUON))


def test_every_matrix_and_its_gradient_are_compared() -> None:
    some = {"layers.0.attention.q_proj.weight", "layers.1.moe.experts.w2", "lm_head.weight"}
    for step in one_process(MUON):
        assert some <= step.gradients.keys() == step.parameters.keys()


def test_another_update_shows_before_any_other_gradient() -> None:
    whole = {**MUON, "optim.muon.per_head": False}
    (found,) = differences(one_process(whole, steps=1), one_process(MUON, steps=1))
    assert "updated parameters differ" in found and "q_proj" in found and "experts" not in found


@pytest.mark.ops
def test_whole_matrix_muon_gathers_what_tensor_ranks_hold() -> None:
    whole = {**MUON, "optim.muon.per_head": False}
    reference = one_process(whole)
    assert not differences(train(2, {"tensor": 2}, whole), reference)
    assert differences(one_process(MUON), reference), "per-head and whole-matrix updates must differ"


@pytest.mark.ops
def test_the_routers_matrix_and_the_scale_of_whole_matrices() -> None:
    switched = {**MUON, "optim.muon.router": True, "optim.muon.scale": "matrix"}
    reference = one_process(switched)
    assert not differences(train(4, {"tensor": 2, "expert": 2}, switched), reference)
    assert differences(one_process(MUON), reference), "the switches must act"
