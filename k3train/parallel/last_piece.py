"""The last rows of a rank's slice, which the ranks behind ask for: the last document piece, whose summary is made here, and
the last inputs of the convolutions. They are often few, and cost as much as they are long, in the backward too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from k3kernels.kda import kda, kda_segment

if TYPE_CHECKING:
    from k3train.model.kda import KDA


class _WithTail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.begin, ctx.shape = begin, x.shape
        return x.view_as(x), x[begin:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, full: torch.Tensor | None, tail: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if tail is None:
            return full, None
        if full is None:
            full = tail.new_zeros(ctx.shape)
        elif not full.is_contiguous():  # an expanded one, as sums give it, has no memory for every element
            full = full.clone(memory_format=torch.contiguous_format)
        full[ctx.begin :].add_(tail)
        return full, None


def with_tail(x: torch.Tensor, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, ...] and x[begin:], both views, for two uses of which the second sees the last rows alone.

    Plain slicing fills a gradient of n rows with zeros for the second use and adds it to the first one's. Here the tail's
    gradient is added in place to the last rows of the first one's, and the other rows are not touched.

    So the gradient that arrives for the first output is written to, and nobody else may hold it. Autograd cannot tell. It
    is so where that output has one reader, reached through views alone, whose backward allocates a tensor for each of
    its inputs, as those of KDA and of the convolutions do, and where no hook and no retain_grad keeps that gradient:
    inside `kda_attention`. It would not be so for with_tail(x, n)[0] + y, since a sum hands both terms one gradient.
    """
    if begin == 0:  # the same rows twice: autograd's own sum does no more
        return x, x
    return _WithTail.apply(x, begin)


def summarize(
    layer: KDA, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, *, again: bool,
    cu_seqlens: torch.Tensor | None = None, start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """M [H, K, K] and S [H, K, V] of k, v, z [n, H * K] and beta [n, H], as `kda_segment` finds them.

    again: keep none of its intermediates; the backward makes them a second time.
    """

    def summary(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kda_segment(*tensors, bound=layer.ctx.model.kda.decay_bound, cu_seqlens=cu_seqlens, start=start)

    inputs = _of_heads(layer, k, v, z, beta)
    return checkpoint(summary, *inputs, use_reentrant=False, preserve_rng_state=False) if again else summary(*inputs)


def last_state(
    layer: KDA, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, begin: torch.Tensor, *, again: bool
) -> torch.Tensor:  # fmt: skip
    """The state fp32 [H, K, V] that tokens begin ... n - 1 of k, v, z [n, H * K] and beta [n, H] leave when nothing enters.

    begin: int32 [1] on k's device, which nobody reads on the host. again: as for `summarize`.
    """
    borders = torch.cat([begin.new_zeros(1), begin, begin.new_full((1,), k.shape[0])])

    def state(k: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        _, states = kda(
            k.detach(), k, *others, bound=layer.ctx.model.kda.decay_bound, cu_seqlens=borders, output_final_state=True
        )
        assert states is not None
        return states[1]

    inputs = _of_heads(layer, k, v, z, beta)
    return checkpoint(state, *inputs, use_reentrant=False, preserve_rng_state=False) if again else state(*inputs)  # type: ignore[no-any-return]


def _of_heads(
    layer: KDA, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """As the kernels take them, with the layer's decay."""
    per_head = (x.view(1, -1, layer.heads, layer.head_dim) for x in (k, v, z))
    return (*per_head, beta.view(1, -1, layer.heads), layer.A_log, layer.dt_bias)
