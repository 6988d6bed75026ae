"""QK-Clip scales the same heads by the same factors under every layout: three steps in fp32, heads clipped in each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.compare import differences, one_process, train

CLIP = {"optim.qk_clip": 0.45}
MUON = {**CLIP, "optim.name": "muon", "optim.muon.ns_dtype": "fp32", "optim.lr": 1e-3}
Case = tuple[int, dict[str, Any], dict[str, Any]]
LAYOUTS: list[Case] = [
    (2, {"tensor": 2}, CLIP),
    (2, {"context": 2}, {**CLIP, "train.micro_batch": 1}),
    (2, {"pipeline": 2, "virtual": 2}, CLIP),
    (2, {"data": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}, CLIP),
    (2, {"data": 2}, MUON),
]
FURTHER: list[Case] = [  # with -m ops
    (2, {"pipeline": 2}, CLIP),
    (2, {"data": 2}, CLIP),
    (2, {"data": 2}, {**CLIP, "train.recompute": "full"}),
    (4, {"tensor": 2, "data": 2}, CLIP),
    (4, {"context": 2, "pipeline": 2}, MUON),
    (2, {"context": 2}, {**CLIP, "train.micro_batch": 1, "train.cuda_graphs": "step"}),  # documents on the device
]
CASES = [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.ops) for case in FURTHER)]


@pytest.mark.parametrize(("world", "sizes", "overrides"), CASES, ids=str)
def test_the_clipped_steps_are_those_of_one_process(
    world: int, sizes: dict[str, Any], overrides: dict[str, Any]
) -> None:
    want = one_process({k: v for k, v in overrides.items() if k.startswith("optim.")})
    heads = [step.extra["train/qk_clipped_heads"] for step in want]
    assert heads[0] > 6 and all(heads), heads
    assert not differences(train(world, sizes, overrides), want)


def test_clipping_changes_the_steps() -> None:
    assert differences(one_process(CLIP), one_process({"optim.qk_clip": 1e9}))
