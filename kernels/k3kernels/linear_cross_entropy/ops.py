"""The public entry of the linear cross entropy: a loop over chunks of tokens, so that whole logits never exist.

The vocabulary may be cut over the ranks of a process group (rank r holds rows r V_local ...): then each chunk costs two
all-reduces of a few numbers a token.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3kernels.checks import check_same_device, check_tensor, choose_backend
from k3kernels.linear_cross_entropy import reference

BACKENDS = ("auto", "naive", "torch", "triton")
CHUNK = 4096  # tokens: fewer would spend much of a product's time on adding up the weight's gradient
CHUNK_BYTES = 1 << 30  # of logits


def automatic_chunk(vocabulary: int, itemsize: int) -> int:
    """Tokens of a chunk: 4096, or as many (in 128s) as keep their logits of this vocabulary (slice) under 1 GiB."""
    return max(128, min(CHUNK, CHUNK_BYTES // (vocabulary * itemsize) // 128 * 128))


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, token_weights: Tensor | None = None,
    group: dist.ProcessGroup | None = None, ignore_index: int = -100, chunk: int = 0, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """-log softmax(hidden weight^T)[label] of every token; logits exist a chunk of tokens at a time.

    Args:
        hidden: [T, d], fp32, bf16, fp16 or fp64, the same on all ranks of `group`.
        weight: [V, d] like hidden; this rank's rows of the vocabulary.
        labels: int64 [T], indices into the whole vocabulary; a token of label `ignore_index` has loss 0.
        token_weights: fp32 [T]. Given, the gradients are found with the losses, which saves computing the logits
            again, and are right for a loss of the form (losses * token_weights).sum() times any number. For another
            form backward raises on a CPU and gives NaN on a GPU (which never stops to look). None: any loss; the
            backward pass computes the logits a second time.
        group: ranks that hold the vocabulary together, or None for this rank alone.
        chunk: tokens whose logits exist at a time; 0 is `automatic_chunk`.
        backend: auto (Triton on CUDA, else torch), naive (whole logits, one rank), torch or triton.

    Returns:
        fp32 [T] (fp64 for fp64 inputs). The gradient of weight is summed over chunks in fp32. The gradient of hidden
        is this rank's part: the caller sums it over `group`, as for any column-parallel product.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    check_tensor("hidden", hidden, (None, None), "[T, d]")
    check_tensor("weight", weight, (None, hidden.shape[1]), "[V, d]")
    if weight.dtype != hidden.dtype:
        raise TypeError(f"weight: expected {hidden.dtype} like hidden, got {weight.dtype}")
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape != hidden.shape[:1]:
        got = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"labels: expected int64 [T] = [{hidden.shape[0]}], got {got}")
    if token_weights is not None:
        check_tensor("token_weights", token_weights, (hidden.shape[0],), "[T]")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 0:
        raise ValueError(f"chunk: expected a number of tokens, or 0 for the automatic one, got {chunk!r}")
    check_same_device("hidden", hidden, {"weight": weight, "labels": labels, "token_weights": token_weights})
    backend = choose_backend(backend, BACKENDS, hidden)
    group = None if group is None or group.size() == 1 else group
    if backend == "naive":
        if group is not None:
            raise ValueError(f"backend: naive holds the whole vocabulary on one rank, got a group of {group.size()}")
        return reference.linear_cross_entropy_naive(hidden, weight, labels, ignore_index)
    head = _Head(group, ignore_index, chunk or automatic_chunk(weight.shape[0], weight.element_size()), backend)
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(head, wanted, hidden, weight, labels, token_weights)


class _Head:
    """How a chunk is computed."""

    def __init__(self, group: dist.ProcessGroup | None, ignore_index: int, chunk: int, backend: str) -> None:
        self.group, self.ignore_index, self.chunk, self.backend = group, ignore_index, chunk, backend

    def first(self, weight: Tensor) -> int:
        """The index of this rank's first row of the vocabulary."""
        return 0 if self.group is None else self.group.rank() * weight.shape[0]

    def losses(self, logits: Tensor, labels: Tensor, weight: Tensor, grad: Tensor | None) -> tuple[Tensor, Tensor]:
        """Losses and logs of the softmax's denominators [c]; with grad [c] the logits become their gradient."""
        ignored = labels == self.ignore_index
        if grad is not None:
            grad = grad.masked_fill(ignored, 0.0)
        if self.group is None and self.backend == "triton":
            from k3kernels.linear_cross_entropy.triton_softmax import whole_triton

            lse, target = whole_triton(logits, labels, grad)
        else:
            lse, target = self.reduced(logits, labels, self.first(weight))
            if grad is not None:
                self.gradient(logits, labels, lse, grad, self.first(weight))
        return (lse - target).masked_fill_(ignored, 0.0), lse

    def reduced(self, logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
        if self.backend == "triton":
            from k3kernels.linear_cross_entropy.triton_softmax import statistics_triton as statistics
        else:
            statistics = reference.statistics_torch
        top, total, target = statistics(logits, labels, first)
        if self.group is not None:
            highest = top.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.group)
            both = torch.stack([total * (top - highest).exp(), target])
            dist.all_reduce(both, group=self.group)
            top, (total, target) = highest, both
        return top + total.log(), target

    def gradient(self, logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, first: int) -> None:
        if self.backend == "triton":
            from k3kernels.linear_cross_entropy.triton_softmax import gradient_triton as gradient
        else:
            gradient = reference.gradient_torch
        gradient(logits, labels, lse, grad, first)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b, summed in fp32 (fp64) and kept so."""
    if a.is_cuda and a.element_size() == 2:
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    wide = reference.arithmetic(a.dtype)
    a, b = a.to(wide), b.to(wide)
    return a @ b if total is None else total.addmm_(a, b)


class _Gradients:
    """The gradients of hidden and weight, filled chunk by chunk from the gradient of the logits."""

    def __init__(self, hidden: Tensor, weight: Tensor, chunk: int, needed: tuple[bool, bool]) -> None:
        self.several = hidden.shape[0] > chunk
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.wants_weight = needed[1]
        self.weight: Tensor | None = None

    def add(self, grad_logits: Tensor, hidden: Tensor, weight: Tensor, start: int) -> None:
        if self.hidden is not None:
            torch.mm(grad_logits, weight, out=self.hidden[start : start + hidden.shape[0]])
        if not self.wants_weight:
            return
        if self.several:
            self.weight = _add_product(self.weight, grad_logits.t(), hidden)
        else:
            self.weight = grad_logits.t() @ hidden

    def result(self, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self.wants_weight and self.weight is None:  # no tokens
            return self.hidden, torch.zeros_like(weight)
        return self.hidden, None if self.weight is None else self.weight.to(weight.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: _Head,
        wanted: bool,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_weights: Tensor | None,
    ) -> Tensor:
        hidden = hidden.contiguous()
        tokens, dtype = hidden.shape[0], reference.arithmetic(hidden.dtype)
        losses, lse = torch.empty(2, tokens, dtype=dtype, device=hidden.device)
        needed = ctx.needs_input_grad[2:4]
        now = _Gradients(hidden, weight, head.chunk, needed) if wanted and token_weights is not None else None
        for start in range(0, tokens, head.chunk):
            part = slice(start, min(start + head.chunk, tokens))
            logits = hidden[part] @ weight.t()
            grad = None if now is None or token_weights is None else token_weights[part].to(dtype)
            losses[part], lse[part] = head.losses(logits, labels[part], weight, grad)
            if now is not None:
                now.add(logits, hidden[part], weight, start)
            del logits
        ctx.head = head
        if now is not None and token_weights is not None:
            ctx.found = now.result(weight)
            ctx.save_for_backward(token_weights)
        else:
            ctx.found = None
            ctx.save_for_backward(hidden, weight, labels, lse)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if len(ctx.saved_tensors) == 1:
            return (None, None, *_scaled(ctx, grad), None, None)
        head, (hidden, weight, labels, lse) = ctx.head, ctx.saved_tensors
        grad = grad.to(lse.dtype).masked_fill(labels == head.ignore_index, 0.0)
        gradients = _Gradients(hidden, weight, head.chunk, ctx.needs_input_grad[2:4])
        for start in range(0, hidden.shape[0], head.chunk):
            part = slice(start, min(start + head.chunk, hidden.shape[0]))
            logits = hidden[part] @ weight.t()
            head.gradient(logits, labels[part], lse[part], grad[part], head.first(weight))
            gradients.add(logits, hidden[part], weight, start)
            del logits
        return (None, None, *gradients.result(weight), None, None)


def _scaled(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients found in the forward pass times the number c with grad = c token_weights."""
    if ctx.found is None:
        raise RuntimeError(
            "token_weights: their gradients serve one backward pass; leave them out to walk a graph twice"
        )
    found, ctx.found = ctx.found, None  # they are scaled in place: the largest is as large as the weight
    (weights,) = ctx.saved_tensors
    weights = weights.to(grad.dtype)
    square = weights.square().sum()
    factor = torch.where(square > 0, (grad * weights).sum() / square, 0.0)
    proportional = ((grad - factor * weights).abs() <= 1e-4 * grad.abs().amax() if grad.numel() else square >= 0).all()
    if not grad.is_cuda and not proportional and factor.isfinite():  # a loss that is NaN has gradients that are
        raise ValueError("token_weights: the loss is not (losses * token_weights).sum() times a number; leave them out")
    factor = factor.where(proportional, float("nan"))
    return tuple(None if t is None else t.mul_(factor) for t in found)
