"""Multi-token prediction trains alike under every layout: the further layer's gradients, and what it adds to others'."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.compare import differences, one_process, train

MTP = {"model.mtp_layers": 1, "model.mtp_loss_weight": 0.5}
Case = tuple[int, dict[str, Any], dict[str, Any]]
LAYOUTS: list[Case] = [
    (2, {"pipeline": 2, "virtual": 2}, {}),
    (2, {"context": 2}, {"train.micro_batch": 1, "train.global_batch": 4}),
    (2, {"data": 2}, {"train.recompute": "full"}),
]
FURTHER: list[Case] = [  # with -m ops
    (2, {"pipeline": 2}, {}),
    (2, {"data": 2}, {"train.recompute": "full", "train.recompute_layers": 5}),  # the further layer is kept
    (2, {"data": 2}, {"optim.qk_clip": 0.45}),
    (4, {"pipeline": 2, "expert": 2, "transport": "padded"}, {}),
    (4, {"context": 2, "tensor": 2}, {"train.micro_batch": 1, "train.recompute": "unit"}),
    (2, {"context": 2}, {"train.micro_batch": 1, "train.cuda_graphs": "step"}),  # documents looked up on the device
]
CASES = [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.ops) for case in FURTHER)]


@pytest.mark.parametrize(("world", "sizes", "overrides"), CASES, ids=str)
def test_the_further_layer_trains_as_in_one_process(
    world: int, sizes: dict[str, Any], overrides: dict[str, Any]
) -> None:
    want = one_process(MTP | {k: v for k, v in overrides.items() if k.startswith(("optim.", "train.global_batch"))})
    assert all("train/mtp_loss" in step.extra for step in want)
    assert not differences(train(world, sizes, MTP | overrides), want)


def test_the_main_loss_is_not_changed_by_a_weight_of_zero() -> None:
    free = {"optim.clip_grad": 0.0}  # the last bit of a norm, and so of what it clips, follows the number of parameters
    plain, idle = one_process(free), one_process({**MTP, **free, "model.mtp_loss_weight": 0.0})
    for a, b in zip(plain, idle):
        assert (a.loss, a.tokens) == (b.loss, b.tokens)
        assert all(not b.gradients[n].any() for n in b.gradients.keys() - a.gradients.keys())
        assert all((b.gradients[n] == g).all() for n, g in a.gradients.items())
