"""Gradients that every tensor rank sees in part must be summed: one named test each, that fails without its sum."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.parallel.assemble import Seen, assemble
from tests.parallel.compare import FLOOR, RELATIVE, distance, one_process, train
from tests.parallel.pool import pool

PARTS = {
    "KDA output norm (own heads)": "attention.o_norm",
    "KDA decay gate's first matrix (own tokens)": "attention.f_a_proj.weight",
    "latent norm": "moe.latent_norm.weight",
    "latent down projection": "moe.latent_down.weight",
    "router": "moe.router.weight",
    "attention residual queries": "residual.query",
    "attention residual norms": "residual.norm_weight",
    "MLA latent and shared key slice": "attention.kv_a_proj.weight",
    "MLA query latent norm": "attention.q_a_norm.weight",
    "input norm": "input_norm.weight",
    "final norm": "final_norm.weight",
}


@cache
def two_tensor_ranks() -> Seen:
    """One step of two tensor ranks, for every test here."""
    (step,) = train(2, {"tensor": 2}, steps=1)
    return step


@pytest.mark.parametrize("what", PARTS)
def test_partial_gradient_is_summed_over_tensor_ranks(what: str) -> None:
    ending = PARTS[what]
    (want,) = one_process(steps=1)
    got = two_tensor_ranks()
    names = [n for n in want.gradients if n.endswith(ending)]
    assert names
    for name in names:
        assert float(want.gradients[name].norm()) > 1e3 * FLOOR * want.grad_norm, f"{name} has no gradient to lose"
        assert distance(got.gradients[name], want.gradients[name], want.grad_norm) <= RELATIVE, name
    # and the sum is what makes it so: one micro-batch shows it
    case, small = "tests.parallel.cases:train", {"train.global_batch": 2}
    ranks = pool(2).run(case, sizes={"tensor": 2}, overrides=small, steps=1, sabotage=f"sum:{ending}")
    with pytest.raises(AssertionError, match=f"tensor ranks disagree on .*{ending}"):
        assemble(ranks)


def test_shared_key_slice_of_mla_gets_the_gradient_of_every_head() -> None:
    """The last rows of kv_a_proj make the key channels that all heads, on all tensor ranks, share."""
    (want,), got = one_process(steps=1), two_tensor_ranks()
    name = "layers.3.attention.kv_a_proj.weight"
    shared = want.gradients[name][8:]
    assert shared.shape[0] == 4 and float(shared.norm()) > 0
    assert distance(got.gradients[name][8:], shared, want.grad_norm) <= RELATIVE
    assert not torch.equal(got.gradients[name], torch.zeros_like(got.gradients[name]))
