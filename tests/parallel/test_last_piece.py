"""Rows used twice, as a whole and their tail alone: gradients of plain slicing at a cost that follows the tail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from k3train.parallel.last_piece import with_tail

ROWS, COLUMNS = 12, 5
Uses = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Split = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]

USES: dict[str, Uses] = {
    "both": lambda full, tail, w: (full.sin() * w).sum() + (tail.cos() * w[-len(tail) :]).sum(),
    "the whole alone": lambda full, tail, w: (full.sin() * w).sum(),
    "the tail alone": lambda full, tail, w: (tail.cos() * w[-len(tail) :]).sum(),
    "both, twice each": lambda full, tail, w: (full.sin() * full * w).sum() + (tail.cos() * tail).sum(),
    "both, through views": lambda full, tail, w: (
        (full.view(1, ROWS, COLUMNS).sin() * w).sum() + (tail.view(1, -1, COLUMNS).cos() * w[-len(tail) :]).sum()
    ),
    "both summed, whose gradients are expanded": lambda full, tail, w: full.sum() + 2 * tail.sum(),
    "the whole transposed, whose gradient is": lambda full, tail, w: (
        (full.mT.contiguous().sin() * w.mT).sum() + tail.sum()
    ),
}


def plain(x: torch.Tensor, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x[begin:]


def gradient(split: Split, use: Uses, begin: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(ROWS, COLUMNS, generator=generator).to(dtype) for _ in range(2))
    x.requires_grad_()
    # a function in front, so that the gradient arrives by way of a node rather than in a leaf
    (found,) = torch.autograd.grad(use(*split(x * 1, begin), w), x)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("begin", [0, 1, 7, ROWS - 1], ids=["all rows", "all but one", "some", "one row"])
@pytest.mark.parametrize("use", list(USES))
def test_gradients_are_those_of_slicing(use: str, begin: int, dtype: torch.dtype) -> None:
    found, wanted = (gradient(split, USES[use], begin, dtype) for split in (with_tail, plain))
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=1e-12 if dtype == torch.float64 else 2e-2, atol=0)


def test_outputs_are_views() -> None:
    x = torch.randn(ROWS, COLUMNS, requires_grad=True)
    full, tail = with_tail(x, 7)
    assert full.data_ptr() == x.data_ptr()
    assert tail.data_ptr() == x[7:].data_ptr()
    assert torch.equal(full, x)
    assert torch.equal(tail, x[7:])


class Anchored(torch.autograd.Function):
    """y; the others are inputs without a gradient, as the anchor of the state scan is."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = len(others)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, *[None] * ctx.others


def test_uses_without_gradients_give_none() -> None:
    x, y = (torch.randn(ROWS, COLUMNS, requires_grad=True) for _ in range(2))
    Anchored.apply(y, *with_tail(x * 1, 7)).sum().backward()
    assert x.grad is None


def test_a_second_backward_over_the_graph_is_the_first() -> None:
    x = torch.randn(ROWS, COLUMNS, requires_grad=True)
    full, tail = with_tail(x * 1, 7)
    loss = (full.sin() * 2).sum() + tail.cos().sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_gradients_of_gradients_are_refused() -> None:
    x = torch.randn(ROWS, COLUMNS, requires_grad=True)
    full, tail = with_tail(x * 1, 7)
    (first,) = torch.autograd.grad(full.sin().sum() + tail.cos().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


class Shapes(TorchDispatchMode):
    """Of every operation that makes or writes a tensor: its name and the shape of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.seen.append((func.__name__, tuple(out.shape)))
        return out


@pytest.mark.parametrize(
    ("split", "large"),
    [(with_tail, set()), (plain, {"slice_backward.default", "add.Tensor"})],
    ids=["with_tail", "plain slicing"],
)
def test_nothing_of_all_rows_is_made_for_the_tail(split: Split, large: set[str]) -> None:
    x = torch.randn(ROWS, COLUMNS, requires_grad=True)
    full, tail = split(x.view(ROWS, COLUMNS), 9)
    grads = torch.randn(ROWS, COLUMNS), torch.randn(3, COLUMNS)
    with Shapes() as shapes:
        torch.autograd.backward((full * 1, tail * 1), grads)
    assert {name for name, shape in shapes.seen if shape[0] == ROWS} - {"mul.Tensor", "detach.default"} == large
    assert [shape for name, shape in shapes.seen if name == "add_.Tensor"] == [(3, COLUMNS)] * (split is with_tail)
