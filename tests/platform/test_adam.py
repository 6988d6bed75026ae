"""FusedAdam against torch: the same bits as AdamW and Adam, and the step in the parameter group."""

from __future__ import annotations

import copy

import pytest
import torch

from k3train.platform.adam import FusedAdam


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((17, 5), (3,), (4, 2, 2))]


def give_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("decay", [0.0, 0.1], ids=["without-decay", "with-decay"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "classic-adam"])
def test_ten_steps_give_the_bits_of_torch(decoupled: bool, decay: float) -> None:
    ours, theirs = parameters(), parameters()
    options = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay}
    adam = FusedAdam(ours, adam_w_mode=decoupled, **options)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, foreach=True, **options)
    for step in range(10):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        adam.step()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(adam.state[p]["exp_avg"], reference.state[q]["exp_avg"])
        assert torch.equal(adam.state[p]["exp_avg_sq"], reference.state[q]["exp_avg_sq"])


def test_the_step_lives_in_the_group_and_counts_without_gradients() -> None:
    params = parameters()
    adam = FusedAdam([{"params": params[:1]}, {"params": params[1:]}])
    params[0].grad = torch.ones_like(params[0])
    adam.step()
    assert [group["step"] for group in adam.param_groups] == [1, 1]
    assert set(adam.state[params[0]]) == {"exp_avg", "exp_avg_sq"}
    assert not adam.state[params[1]]


def test_a_loaded_state_continues_bit_for_bit() -> None:
    straight, resumed = parameters(), parameters()
    first, second = FusedAdam(straight, lr=0.01), FusedAdam(resumed, lr=0.01)
    for step in range(6):
        give_gradients(straight, step)
        first.step()
        if step == 2:
            with torch.no_grad():
                for p, q in zip(resumed, straight, strict=True):
                    p.copy_(q)
            second.load_state_dict(copy.deepcopy(first.state_dict()))
        if step > 2:
            give_gradients(resumed, step)
            second.step()
    assert second.param_groups[0]["step"] == 6
    for p, q in zip(straight, resumed, strict=True):
        assert torch.equal(p, q)


def test_an_empty_shard_is_left_alone() -> None:
    empty = torch.nn.Parameter(torch.empty(0))
    empty.grad = torch.empty(0)
    FusedAdam([empty]).step()


@pytest.mark.parametrize("option", ["amsgrad", "capturable"])
def test_options_that_do_not_exist_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=option):
        FusedAdam(parameters(), **{option: True})
