"""The public entries of attention residuals: one mix, and the mixes of a block of layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k3kernels.attention_residuals import reference
from k3kernels.checks import check_choice, check_same_device, check_tensor

BACKENDS = ("auto", "naive", "torch", "triton")
MOST_SOURCES = 32  # of the Triton kernels, which are compiled for their number
GROUP = 8  # mixes whose gradients wait for one pass over the block's sources: 8 tensors [T, d], backward only


def first_phase_pays(sources: int, mixes: int) -> bool:
    """Whether two phases move less memory than one pass a mix.

    In tensors [T, d] of bf16, with fp32 sums between the phases: n + 2m written, (2 + 1 + 1) m read and written
    afterwards, against m (n + 2).
    """
    return sources + 6 * mixes < mixes * (sources + 2)


def attention_residual(
    sources: Sequence[Tensor], query: Tensor, norm_weight: Tensor, *, eps: float = 1e-5,
    output_weight: Tensor | None = None, output_eps: float = 1e-5, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """softmax_j( rms(v_j) . (norm_weight * query) ) over depth, times the raw v_j (Kimi K3 report section 2.2).

    Args:
        sources: n tensors [T, d], one dtype; fp32, bf16, fp16 (fp64: naive and torch only).
        query, norm_weight: [d].
        eps: inside the root of the sources' norms.
        output_weight: [d]; the mix is rounded and passes an RMS norm with this weight and `output_eps` as well.
        backend: auto (Triton on CUDA, else torch), naive, torch or triton.

    Returns:
        [T, d] like a source; computed in fp32 (fp64 for fp64 sources). Gradients flow to all tensors.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names the argument, the rule and the value.
    """
    block = DepthBlock(sources, eps=eps, backend=backend)
    x, _ = block.mix(None, query, norm_weight, output_weight=output_weight, output_eps=output_eps)
    return x


class DepthBlock:
    """The finished sources that the sublayers of a block read, and one pass over them for all of their gradients.

    `sources` are the given tensors again: whoever reads them after this block must read these, since their gradients
    are added up inside its backward pass. The mixes' own gradients (eight at a time) live from their backward until
    the block's; forward keeps nothing but its inputs and, for each mix, fp32 numbers a token: 2 (n + 1) + 1 with Triton.
    """

    def __init__(self, sources: Sequence[Tensor], *, eps: float = 1e-5, backend: str = "auto") -> None:
        """sources: n tensors [T, d]."""
        if not sources:
            raise ValueError("sources: expected at least one tensor [T, d], got none")
        first = check_tensor("sources[0]", sources[0], (None, None), "[T, d]")
        for i, v in enumerate(sources[1:], 1):
            check_tensor(f"sources[{i}]", v, tuple(first.shape), "[T, d]")
            if v.dtype != first.dtype:
                raise TypeError(f"sources[{i}]: expected {first.dtype} like sources[0], got {v.dtype}")
        check_same_device("sources[0]", first, {f"sources[{i}]": v for i, v in enumerate(sources)})
        if not eps > 0:
            raise ValueError(f"eps: expected a positive number, got {eps}")
        check_choice("backend", backend, BACKENDS)
        if backend == "auto":
            fits = first.element_size() < 8 and len(sources) < MOST_SOURCES
            backend = "triton" if first.is_cuda and fits else "torch"
        if backend == "triton" and len(sources) >= MOST_SOURCES:
            raise ValueError(
                f"sources: Triton takes fewer than {MOST_SOURCES}, got {len(sources)}; use backend='torch'"
            )
        self.eps, self.backend = eps, backend
        self._pending = _Pending(backend)
        self.sources: tuple[Tensor, ...] = tuple(sources)
        if backend != "naive" and torch.is_grad_enabled() and any(v.requires_grad for v in sources):
            self.sources = _Open.apply(self._pending, *sources)
        self._states: dict[int, tuple[Tensor, ...]] = {}

    def prepare(self, queries: Sequence[Tensor], norm_weights: Sequence[Tensor]) -> None:
        """The first phase of the mixes with these queries (and a running sum), in one pass over the sources.

        Each result is used once, by the `mix` with that query, and takes T d fp32 until then. With Triton only.
        """
        if self.backend != "triton" or not queries:
            return
        from k3kernels.attention_residuals.triton_mix import first_phase

        with torch.no_grad():
            keys = torch.stack([q.float() * w.float() for q, w in zip(queries, norm_weights)])
            parts = first_phase(tuple(v.detach().contiguous() for v in self.sources), keys, self.eps)
        self._states = {id(q): tuple(t[i] for t in parts) for i, q in enumerate(queries)}

    def mix(
        self, partial: Tensor | None, query: Tensor, norm_weight: Tensor, *, output_weight: Tensor | None = None,
        output_eps: float = 1e-5,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """What one sublayer reads, and `partial` again, for whoever adds to it (its gradient is summed in the kernel).

        partial: running sum [T, d], the last source, or None. The rest as in `attention_residual`.
        """
        first = self.sources[0]
        width = first.shape[1]
        check_tensor("query", query, (width,), "[d]")
        check_tensor("norm_weight", norm_weight, (width,), "[d]")
        if partial is not None:
            check_tensor("partial", partial, tuple(first.shape), "[T, d]")
        if output_weight is not None:
            check_tensor("output_weight", output_weight, (width,), "[d]")
        check_same_device(
            "sources[0]", first, {"query": query, "norm_weight": norm_weight, "partial": partial}
        )  # fmt: skip
        if self.backend == "naive":
            sources = self.sources if partial is None else (*self.sources, partial)
            x = reference.mix_naive(sources, query, norm_weight, self.eps, output_weight, output_eps)
            return x, partial
        state = None if partial is None else self._states.pop(id(query), None)
        found = _Mix.apply(
            self._pending, state, self.eps, output_eps, query, norm_weight, output_weight, partial, *self.sources
        )
        return (found, None) if partial is None else found


class _Pending:
    """Mixes of a block that have run backward and whose share of the sources' gradients is still to be collected."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.expected = 0  # mixes of the forward pass
        self.keys: list[Tensor] = []
        self.mixes: list[dict[str, Any]] = []  # torch
        self.g: Tensor | None = None  # Triton: [GROUP or fewer, T, d]
        self.numbers: Tensor | None = None
        self.sums: Tensor | None = None  # [n, T, d] of full groups

    def slot(self, bank: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Where the next mix leaves its g [T, d] and its numbers fp32 [T, n, 3]."""
        if len(self.keys) == GROUP:
            self.sums = self._collect(bank, [None] * len(bank))
        if self.g is None or self.numbers is None:
            size, (rows, width) = max(1, min(GROUP, self.expected)), bank[0].shape
            self.g = torch.empty(size, rows, width, dtype=bank[0].dtype, device=bank[0].device)
            self.numbers = torch.empty(size, rows, len(bank), 3, dtype=torch.float32, device=bank[0].device)
        if len(self.keys) == self.g.shape[0]:  # more mixes ran backward than forward: a graph was walked twice
            self.sums = self._collect(bank, [None] * len(bank))
        return self.g[len(self.keys)], self.numbers[len(self.keys)]

    @staticmethod
    def scratch(bank: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The same for sources that need no gradient."""
        first = bank[0]
        return torch.empty_like(first), first.new_empty(first.shape[0], len(bank), 3, dtype=torch.float32)

    def _collect(self, bank: tuple[Tensor, ...], arrived: list[Tensor | None]) -> Tensor:
        from k3kernels.attention_residuals.triton_mix import collect_triton

        assert self.g is not None and self.numbers is not None
        sums = bank[0].new_empty(len(bank), *bank[0].shape) if self.sums is None else self.sums
        m = len(self.keys)
        collect_triton(
            bank, arrived, sums.unbind(0), self.g[:m], torch.stack(self.keys), self.numbers[:m],
            add=self.sums is not None,
        )  # fmt: skip
        self.keys = []
        return sums

    def finish(self, bank: tuple[Tensor, ...], arrived: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the sources; forgets everything."""
        if self.backend == "torch":
            mixes, keys = self.mixes, self.keys
            self.mixes, self.keys = [], []
            return [*reference.collect_torch(bank, arrived, mixes, keys)] if mixes else arrived
        if not self.keys and self.sums is None:
            return arrived
        if self.keys:
            self.sums = self._collect(bank, arrived)
            arrived = [None] * len(bank)
        assert self.sums is not None
        found = [s if a is None else s + a for s, a in zip(self.sums.unbind(0), arrived)]
        self.g = self.numbers = self.sums = None
        return [*found]


class _Open(torch.autograd.Function):
    """The sources, unchanged; its backward runs after every mix of the block and gives them all their gradients."""

    @staticmethod
    def forward(ctx: Any, pending: _Pending, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.pending = pending
        ctx.save_for_backward(*sources)
        return sources

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor | None) -> tuple[Any, ...]:
        bank = tuple(v.contiguous() for v in ctx.saved_tensors)
        grads = [None if t is None else t.contiguous() for t in arrived]
        return (None, *ctx.pending.finish(bank, grads))


class _Mix(torch.autograd.Function):
    """One mix, and its running sum unchanged. The sources get no gradient here: `_Open` has it."""

    @staticmethod
    def forward(
        ctx: Any, pending: _Pending, state: tuple[Tensor, ...] | None, eps: float, output_eps: float,
        query: Tensor, norm_weight: Tensor, output_weight: Tensor | None, partial: Tensor | None, *bank: Tensor,
    ) -> Any:  # fmt: skip
        dtype = reference.precision(bank[0].dtype)
        key = query.to(dtype) * norm_weight.to(dtype)
        if pending.backend == "triton":
            from k3kernels.attention_residuals.triton_mix import forward_triton

            given = tuple(v.contiguous() for v in bank), None if partial is None else partial.contiguous()
            x, *numbers = forward_triton(*given, key, eps, output_weight, output_eps, state)
        else:
            read = bank if partial is None else (*bank, partial)
            x, *numbers = reference.forward_torch(read, key, eps, output_weight, output_eps)
        if torch._C._current_graph_task_id() == -1:  # a forward that is computed again inside a backward runs none
            pending.expected += 1
        ctx.set_materialize_grads(False)
        ctx.pending, ctx.eps, ctx.output_eps = pending, eps, output_eps
        ctx.normed, ctx.has_partial = output_weight is not None, partial is not None
        ctx.numbers = len(numbers)
        extra = [t for t in (output_weight, partial) if t is not None]
        ctx.save_for_backward(query, norm_weight, *numbers, *extra, *bank)
        return x if partial is None else (x, partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_partial: Tensor | None = None) -> tuple[Any, ...]:
        query, norm_weight, *rest = ctx.saved_tensors
        numbers, rest = rest[: ctx.numbers], rest[ctx.numbers :]
        output_weight = rest.pop(0) if ctx.normed else None
        partial = rest.pop(0).contiguous() if ctx.has_partial else None
        bank, pending = tuple(v.contiguous() for v in rest), ctx.pending
        if grad is None:
            return (*[None] * 7, grad_partial, *[None] * len(bank))
        dtype = reference.precision(grad.dtype)
        key = query.to(dtype) * norm_weight.to(dtype)
        grad, grad_partial = grad.contiguous(), None if grad_partial is None else grad_partial.contiguous()
        waits = any(ctx.needs_input_grad[8:])
        if pending.backend == "triton":
            from k3kernels.attention_residuals.triton_mix import backward_triton

            places = pending.slot(bank) if waits else pending.scratch(bank)
            own, grad_key, grad_output = backward_triton(
                bank, partial, key, output_weight, ctx.output_eps, numbers[0], numbers[1], grad, grad_partial, *places
            )
        else:
            found = reference.backward_torch(
                bank, partial, key, ctx.eps, output_weight, ctx.output_eps, numbers[0], grad, grad_partial
            )
            own, grad_key, grad_output = found["partial"], found["key"], found["output_weight"]
            if waits:
                pending.mixes.append(found)
        if waits:
            pending.keys.append(key)
        grad_query = (grad_key * norm_weight.to(grad_key.dtype)).to(query.dtype)
        grad_norm = (grad_key * query.to(grad_key.dtype)).to(norm_weight.dtype)
        if output_weight is not None and grad_output is not None:
            grad_output = grad_output.to(output_weight.dtype)
        return (None, None, None, None, grad_query, grad_norm, grad_output, own, *[None] * len(bank))
