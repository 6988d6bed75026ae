"""How rows go through a layer of experts on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from k3kernels.routing import ops
from tests.model.test_switches import loss_of, make


def test_the_gradients_of_gate_and_up_meet_in_the_sum_over_a_tokens_copies(
    one_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a sum of their own over all rows; w1 and w3 both see the gradient."""
    model = make(one_rank)
    pairs: list[bool] = []
    gather = ops._gather

    def watched(rows: Tensor, place: Tensor, top_k: int, backend: str, more: Tensor | None = None) -> Tensor:
        pairs.append(more is not None and more.data_ptr() != rows.data_ptr())
        return gather(rows, place, top_k, backend, more)

    loss = loss_of(model)
    monkeypatch.setattr(ops, "_gather", watched)
    loss.backward()
    layers = [m for m in model.modules() if type(m).__name__ == "Experts"]
    assert layers
    assert pairs == [True] * len(layers)
    assert all(w.grad is not None and bool(w.grad.any()) for m in layers for w in (m.w1, m.w3))


def test_experts_take_rows_once_or_twice_with_the_same_gradients(one_rank: Any) -> None:
    """A dispatcher that hands its rows on once leaves the sum of the two gradients to autograd."""
    model = make(one_rank)
    experts = next(m for m in model.modules() if type(m).__name__ == "Experts")
    count, _, width = experts.w1.shape
    z = torch.randn(6 * count, width, generator=torch.Generator().manual_seed(1))
    counts, probs = torch.full((count,), 6), torch.rand(6 * count, generator=torch.Generator().manual_seed(2))
    once, first, second = (z.clone().requires_grad_() for _ in range(3))
    out = experts(once, counts, probs)
    pair = experts(first, counts, probs, second)
    assert torch.equal(out, pair)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    out.backward(grad)
    pair.backward(grad)
    assert once.grad is not None and first.grad is not None and second.grad is not None
    torch.testing.assert_close(first.grad + second.grad, once.grad)
