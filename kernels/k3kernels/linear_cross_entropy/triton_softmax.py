"""The softmax part on a GPU: one program a row; the second read of a row finds it in the cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits of a row that a program holds at a time


@triton.jit
def softmax_kernel(
    logits_ptr, labels_ptr, grad_ptr, lse_ptr, top_ptr, sum_ptr, target_ptr, first, V,
    BV: tl.constexpr, STATISTICS: tl.constexpr, FINISH: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). logits [rows, V]. STATISTICS: top, sum and target fp32 [rows] of this slice of the vocabulary;
    with FINISH the slice is all of it, and lse is written in place of top and sum. GRADIENT: logits become
    (softmax - one hot) * grad, by the lse just found or the given one."""
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * V
    label = tl.load(labels_ptr + row).to(tl.int64) - first
    if STATISTICS:
        top = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        for start in range(0, V, BV):
            column = start + tl.arange(0, BV)
            x = tl.load(base + column, mask=column < V, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
        mine = (label >= 0) & (label < V)
        target = tl.load(base + label, mask=mine, other=0.0).to(tl.float32)
        tl.store(target_ptr + row, target)
        if FINISH:
            lse = top + tl.log(total)
            tl.store(lse_ptr + row, lse)
        else:
            tl.store(top_ptr + row, top)
            tl.store(sum_ptr + row, total)
    if GRADIENT:
        if not STATISTICS:
            lse = tl.load(lse_ptr + row)
        grad = tl.load(grad_ptr + row)
        if STATISTICS:
            tl.debug_barrier()  # the label's logit has been read before it is overwritten
        for start in range(0, V, BV):
            column = start + tl.arange(0, BV)
            x = tl.load(base + column, mask=column < V, other=float("-inf")).to(tl.float32)
            p = (tl.exp(x - lse) - tl.where(column == label, 1.0, 0.0)) * grad
            tl.store(base + column, p.to(logits_ptr.dtype.element_ty), mask=column < V)


def _launch(
    logits: Tensor, labels: Tensor, first: int, *, grad: Tensor | None, lse: Tensor | None, finish: bool
) -> tuple[Tensor, ...]:
    """lse given: the gradient alone. finish: statistics of a whole vocabulary, and the gradient if `grad` is given."""
    rows, V = logits.shape
    statistics = lse is None
    top, total, target = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    known = top if lse is None else lse
    if rows:
        softmax_kernel[(rows,)](
            logits, labels, known if grad is None else grad, known, top, total, target, first, V,
            BV=min(BLOCK, triton.next_power_of_2(V)), STATISTICS=statistics, FINISH=finish, GRADIENT=grad is not None,
            num_warps=8,
        )  # fmt: skip
    return top, total, target


def statistics_triton(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, ...]:
    """As `statistics_torch`."""
    return _launch(logits, labels, first, grad=None, lse=None, finish=False)


def gradient_triton(logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, first: int) -> None:
    """As `gradient_torch`."""
    _launch(logits, labels, first, grad=grad, lse=lse, finish=False)


def whole_triton(logits: Tensor, labels: Tensor, grad: Tensor | None) -> tuple[Tensor, Tensor]:
    """lse and label's logit [c] of a whole vocabulary; with `grad` the logits become the gradient as well."""
    lse, _, target = _launch(logits, labels, 0, grad=grad, lse=None, finish=True)
    return lse, target
