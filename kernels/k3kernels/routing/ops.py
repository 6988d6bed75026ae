"""Public entries of the routing ops. Every shape is known on the host: T tokens times k experts, nothing is dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3kernels.checks import check_choice, check_tensor
from k3kernels.routing import reference

BACKENDS = ("auto", "torch", "triton")
MAX_EXPERTS = 4096
"""Above it a block of tokens times experts does not fit the registers of a Triton program."""


def pick_backend(backend: str, tensor: Tensor, experts: int) -> str:
    """auto means Triton on CUDA tensors, torch elsewhere."""
    check_choice("backend", backend, BACKENDS)
    if backend == "triton" and experts > MAX_EXPERTS:
        raise ValueError(f"backend: triton takes at most {MAX_EXPERTS} experts, got {experts}; use backend='torch'")
    if backend != "auto":
        return backend
    return "triton" if tensor.is_cuda and experts <= MAX_EXPERTS else "torch"


def route(
    logits: Tensor, bias: Tensor, top_k: int, *, renormalize: bool = True, scale: float = 1.0, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Select by sigmoid(logit) + bias, weigh by sigmoid(logit).

    Args:
        logits: fp32 [T, E]; bias: fp32 [E], without gradient; top_k < E.
        renormalize: the k weights of a token are divided by their sum + 1e-20; then all are multiplied by `scale`.

    Returns:
        weights fp32 [T, k] (gradients flow to logits through the selected scores), experts int64 [T, k] by falling
        biased score, and what quantile balancing needs: cut-off value fp32 [T] and expert int64 [T] of place k + 1.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    check_tensor("logits", logits, (None, None), "[T, E]")
    experts = logits.shape[1]
    check_tensor("bias", bias, (experts,), "[E]")
    if not 0 < top_k < experts:
        raise ValueError(f"top_k: must lie in 1 ... E - 1 = {experts - 1}, got {top_k}")
    if pick_backend(backend, logits, experts) == "triton":
        return _Route.apply(logits, bias, top_k, renormalize, float(scale))
    return reference.route(logits, bias, top_k, renormalize, scale)


class _Route(torch.autograd.Function):
    """One pass over the logits; backward writes the dense gradient in one pass from the k weights."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scale: float) -> Any:
        from k3kernels.routing import triton_routing  # imports triton, which CPU users may lack

        weights, scores, experts, cut, cut_expert = triton_routing.route(
            logits.contiguous(), bias, top_k, renormalize, scale
        )
        ctx.save_for_backward(scores, experts)
        ctx.options = (logits.shape[1], renormalize, scale)
        ctx.mark_non_differentiable(experts, cut, cut_expert)
        return weights, experts, cut, cut_expert

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        from k3kernels.routing import triton_routing

        scores, experts = ctx.saved_tensors
        width, renormalize, scale = ctx.options
        return triton_routing.route_backward(grad, scores, experts, width, renormalize, scale), None, None, None, None


def required_bias_counts(
    logits: Tensor, bias: Tensor, cut: Tensor, cut_expert: Tensor, counts: Tensor, *, valid: Tensor | None = None,
    backend: str = "auto",
) -> None:  # fmt: skip
    """Add the histogram of required biases r = cut - sigmoid(logit) to counts int64 [E, bins], in place.

    The cut-off expert's own r is its bias exactly. Bins divide [min bias - 1, max bias + 1] evenly, in fp64. Tokens
    with valid[t] False are left out.
    """
    if pick_backend(backend, logits, logits.shape[1]) == "triton":
        from k3kernels.routing import triton_routing

        triton_routing.histogram(logits.contiguous(), bias, cut.contiguous(), cut_expert.contiguous(), counts, valid)
    else:
        counts += reference.histogram(logits, bias, cut, cut_expert, counts.shape[1], valid)


def _check_experts(experts: Tensor) -> None:
    if experts.dim() != 2 or experts.dtype != torch.int64:
        raise ValueError(f"experts: expected int64 [T, k], got {experts.dtype} {list(experts.shape)}")


def expert_counts(
    experts: Tensor, count: int, *, valid: Tensor | None = None, backend: str = "auto"
) -> Tensor:  # fmt: skip
    """How many of the T * k copies that experts int64 [T, k] ask for go to each of `count` experts: int64 [count].

    Tokens with valid[t] False, bool [T], are left out.
    """
    _check_experts(experts)
    if pick_backend(backend, experts, count) == "triton":
        from k3kernels.routing import triton_routing

        return triton_routing.expert_counts(experts.contiguous(), count, valid)
    return reference.expert_counts(experts, count, valid)


@dataclass(frozen=True)
class Permutation:
    """Rows sorted by expert, in token order within one. Row i is copy `source[i]` = token * k + place; copy c of the
    T * k lies in row `place[c]`. counts: rows of each expert. int32, int32 and int64."""

    source: Tensor
    place: Tensor
    counts: Tensor
    top_k: int


def make_permutation(experts: Tensor, count: int, *, backend: str = "auto") -> Permutation:
    """The order by expert of the T * k copies that experts int64 [T, k] ask for; `count` experts in all."""
    _check_experts(experts)
    if pick_backend(backend, experts, count) == "triton":
        from k3kernels.routing import triton_routing

        return Permutation(*triton_routing.permutation(experts.contiguous(), count), experts.shape[1])
    return Permutation(*reference.permutation(experts, count), experts.shape[1])


def dispatch(x: Tensor, weights: Tensor, order: Permutation, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Rows x [T, D] and weights [T, k] in the order of the experts: [T * k, D] and [T * k].

    The gradient of x is the sum over a token's k copies, in fp32 and a fixed order.
    """
    (rows,) = _Spread.apply(x, order.source, order.place, order.top_k, pick_backend(backend, x, 1), 1)
    return rows, _Reorder.apply(weights.reshape(-1), order.source, order.place)


def dispatch_twice(
    x: Tensor, weights: Tensor, order: Permutation, *, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """`dispatch` for two readers of the rows: rows, the same rows again, weights.

    Both are one memory, not to be written to. The gradients that the readers send are added where they are summed over
    a token's copies, in fp32 with one rounding for all, without a pass over the rows for their sum.
    """
    rows, again = _Spread.apply(x, order.source, order.place, order.top_k, pick_backend(backend, x, 1), 2)
    return rows, again, _Reorder.apply(weights.reshape(-1), order.source, order.place)


def combine(rows: Tensor, order: Permutation, *, backend: str = "auto") -> Tensor:
    """[T * k, D] in the order of the experts -> [T, D], the sum of each token's copies, in fp32 and a fixed order."""
    return _Gather.apply(rows, order.source, order.place, order.top_k, pick_backend(backend, rows, 1))


def _spread(x: Tensor, source: Tensor, top_k: int, backend: str) -> Tensor:
    if backend == "triton":
        from k3kernels.routing import triton_routing

        return triton_routing.spread(x.contiguous(), source, top_k)
    return x.index_select(0, source // top_k)


def _gather(rows: Tensor, place: Tensor, top_k: int, backend: str, more: Tensor | None = None) -> Tensor:
    """more: rows to add to those of `rows`, or None."""
    if backend == "triton":
        from k3kernels.routing import triton_routing

        return triton_routing.gather(rows.contiguous(), None if more is None else more.contiguous(), place, top_k)
    wide = torch.promote_types(rows.dtype, torch.float32)
    copies = rows.index_select(0, place).to(wide)
    if more is not None:
        copies += more.index_select(0, place)
    return copies.view(-1, top_k, rows.shape[1]).sum(1).to(rows.dtype)


class _Spread(torch.autograd.Function):
    """The rows once for each of one or two readers, as views of one memory."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, source: Tensor, place: Tensor, top_k: int, backend: str, readers: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(place)
        ctx.options = (top_k, backend)
        ctx.set_materialize_grads(False)
        rows = _spread(x, source, top_k, backend)
        return (rows, *(rows.view_as(rows) for _ in range(readers - 1)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        sent = [grad for grad in grads if grad is not None]
        dx = _gather(sent[0], ctx.saved_tensors[0], *ctx.options, *sent[1:]) if sent else None
        return dx, None, None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, place: Tensor, top_k: int, backend: str) -> Tensor:
        ctx.save_for_backward(source)
        ctx.options = (top_k, backend)
        return _gather(rows, place, top_k, backend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _spread(grad, ctx.saved_tensors[0], *ctx.options), None, None, None, None


class _Reorder(torch.autograd.Function):
    """values[source], whose gradient is a gather too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, source: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return values.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def product_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, d] times weight [E, d] in fp32 -> [T, E].

    bf16 operands on a GPU go through the matrix units: products of bf16 are exact in fp32 and sums are fp32, so the
    result differs from an fp32 product of the same numbers only in the order of the sum. The gradient enters as the sum
    of two bf16 numbers (16 bits of it).
    """
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        return _Product.apply(x, weight)
    return torch.nn.functional.linear(x.float(), weight.float())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        high = grad.to(torch.bfloat16)
        halves = torch.cat([high, (grad - high.float()).to(torch.bfloat16)], 1)  # [T, 2 E]
        dx = torch.mm(halves, torch.cat([weight, weight]))
        dw = torch.mm(halves.t(), x, out_dtype=torch.float32).view(2, *weight.shape).sum(0).to(weight.dtype)
        return dx, dw
