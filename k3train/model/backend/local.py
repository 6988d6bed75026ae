"""The `local` backend: megatron-core's tensor-parallel linears, plain-torch norms, attention and experts.

It runs anywhere and is the reference for the others, which subclass `Backend` and replace parts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from k3kernels.norm import layer_rms_norm
from k3train.model.backend.grouped import GroupedLinear
from k3train.model.parameters import ParameterSpec, annotate, new_parameter
from k3train.parallel.slices import rounded_up

if TYPE_CHECKING:
    from k3train.model.context import ModelContext, PackedStream


class RMSNorm(nn.Module):
    """fp32 statistics, rounded to the input's dtype before the weight, as the released model does. x [..., width]."""

    def __init__(self, ctx: ModelContext, width: int, *, eps: float, on_local_tokens: bool = True) -> None:
        super().__init__()
        self.eps = eps
        partial = on_local_tokens and ctx.layout.sizes.sequence_parallel
        self.weight = new_parameter(
            ParameterSpec((width,), init="ones"), ctx.layout, ctx.dtype, sum_over_tensor=partial
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and x.dtype == self.weight.dtype:
            return layer_rms_norm(x, self.weight, eps=self.eps)
        x32 = x.float()
        return self.weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Column(ColumnParallelLinear):
    """[T, in] -> [T, out / TP]; the input has already entered the tensor-parallel region (one gather serves many)."""

    def __init__(self, ctx: ModelContext, inputs: int, outputs: int) -> None:
        config = copy.copy(ctx.megatron)
        config.sequence_parallel = False
        super().__init__(
            inputs, outputs, config=config, init_method=_no_init, bias=False, skip_bias_add=True,
            disable_grad_reduce=True, tp_group=ctx.layout.tp,
        )  # fmt: skip
        annotate(self.weight, ParameterSpec((outputs, inputs), tensor_axis=0, std=ctx.model.init_std))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Row(RowParallelLinear):
    """[T, in / TP] -> [T_local, out]; leaves the tensor-parallel region (reduce, or reduce-scatter over tokens)."""

    def __init__(self, ctx: ModelContext, inputs: int, outputs: int) -> None:
        super().__init__(
            inputs, outputs, config=ctx.megatron, init_method=_no_init, bias=False, input_is_parallel=True,
            skip_bias_add=True, tp_group=ctx.layout.tp,
        )  # fmt: skip
        annotate(self.weight, ParameterSpec((outputs, inputs), tensor_axis=1, std=ctx.model.init_std))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Replicated(nn.Module):
    """[T_local, in] -> [T_local, out] with the same weight on every tensor rank, applied to this rank's tokens."""

    def __init__(self, ctx: ModelContext, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = new_parameter(
            ParameterSpec((outputs, inputs), std=ctx.model.init_std), ctx.layout, ctx.dtype,
            sum_over_tensor=ctx.layout.sizes.sequence_parallel,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def _no_init(weight: torch.Tensor) -> torch.Tensor:
    return weight


def attention_mask(stream: PackedStream) -> torch.Tensor:
    """bool [b, 1, s, s]: causal and inside one document, built once a micro-batch."""
    if "attention_mask" not in stream.cache:
        s = stream.sequence_length or stream.total
        documents = stream.document_ids().view(-1, s)
        same = documents[:, :, None] == documents[:, None, :]
        stream.cache["attention_mask"] = same.tril_()[:, None]
    mask = stream.cache["attention_mask"]
    assert isinstance(mask, torch.Tensor)
    return mask


def suffixes_mask(queries: int, keys: int, cu_q: torch.Tensor, cu_k: torch.Tensor) -> torch.Tensor:
    """bool [queries, keys] for documents end to end in both; the last query of each is aligned with its last key."""
    rows, columns = (torch.arange(n, device=cu_q.device, dtype=torch.int32) for n in (queries, keys))
    # the number of borders up to a position names its document: 0 is before the first
    of_row, of_column = (torch.bucketize(at, cu, right=True) for at, cu in ((rows, cu_q), (columns, cu_k)))
    shift = (cu_k[1:] - cu_q[1:]).index_select(0, of_row - 1)  # from a query's place to that of its own key
    return (of_row[:, None] == of_column[None]) & (columns[None] <= (rows + shift)[:, None])


class Backend:
    """Plain torch on megatron-core's tensor-parallel linears."""

    name = "local"
    notice = ""
    """One sentence for the start of a run: what this backend costs or leaves out."""

    def finish(self, model: nn.Module) -> None:
        """Called once with every built chunk of the model, when modules know their names."""

    def weights_changed(self) -> None:
        """Called before the first micro-batch that sees new weights: a step's, or an evaluation's."""

    def products(self, asked: Sequence[tuple[nn.Module, torch.Tensor]]) -> list[torch.Tensor]:
        """module(x) for column-parallel and replicated products; a backend may compute those of one tensor together."""
        return [module(x) for module, x in asked]

    column: type[nn.Module] = Column
    row: type[nn.Module] = Row
    replicated: type[nn.Module] = Replicated
    norm: type[nn.Module] = RMSNorm

    def attention(
        self, q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor, stream: PackedStream, scale: float
    ) -> torch.Tensor:
        """Causal softmax attention inside documents. q, k [T, H, K], v [T, H, V] -> [T, H, V]."""
        total, heads, _ = q_THK.shape
        s = stream.sequence_length or total
        q, k, v = (x.view(-1, s, heads, x.shape[-1]).transpose(1, 2) for x in (q_THK, k_THK, v_THV))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask(stream), scale=scale)
        return out.transpose(1, 2).reshape(total, heads, -1)

    def suffix_attention(
        self, q_NHK: torch.Tensor, k_MHK: torch.Tensor, v_MHV: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Causal attention of one document whose last N positions are queries: q [N, H, K], k [M, H, K] -> [N, H, V]."""
        mask = causal_lower_right(q_NHK.shape[0], k_MHK.shape[0])
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHK, k_MHK, v_MHV))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0].transpose(0, 1)

    def suffixes_attention(
        self, q_NHK: torch.Tensor, k_MHK: torch.Tensor, v_MHV: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
        lengths: Sequence[tuple[int, int]] | int, scale: float,
    ) -> torch.Tensor:  # fmt: skip
        """`suffix_attention` of documents end to end: queries q [N, H, K] and keys k [M, H, K] of each, by the lengths
        (queries, keys) on the host and the borders cu_q, cu_k int32 [documents + 1] on the device, where empty documents
        may follow -> [N, H, V].

        lengths as a number: only the device knows them, and no document is longer. Then empty documents may be anywhere, and
        the keys may begin after row 0, at cu_k[0]; the rows before are in no document, and what comes back as their gradient
        is arbitrary.
        """
        if isinstance(lengths, int):
            mask = suffixes_mask(q_NHK.shape[0], k_MHK.shape[0], cu_q, cu_k)
            q, k, v = (x.transpose(0, 1)[None] for x in (q_NHK, k_MHK, v_MHV))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0].transpose(0, 1)
        sizes_q, sizes_k = (list(sizes) for sizes in zip(*lengths))
        pieces = zip(q_NHK.split(sizes_q), k_MHK.split(sizes_k), v_MHV.split(sizes_k))
        return torch.cat([self.suffix_attention(*piece, scale) for piece in pieces])

    @staticmethod
    def longest(lengths: Sequence[tuple[int, int]] | int, n: int, m: int) -> tuple[int, int]:
        """Bounds on the queries and keys of one document of `suffixes_attention`, whose tensors have n and m rows.

        Kernels start work for every document as if it were this long, and libraries plan anew for every other bound: where
        the host knows the documents, the next power of two.
        """
        if isinstance(lengths, int):
            return min(lengths, n), min(lengths, m)
        queries, keys = (rounded_up(max(sizes)) for sizes in zip(*lengths))
        return queries, keys

    def expert_weight(self, ctx: ModelContext, spec: ParameterSpec) -> nn.Module | nn.Parameter:
        """The stacked experts of this rank, [E_local, out, in], in the form that `grouped_linear` takes."""
        return new_parameter(spec, ctx.layout, ctx.dtype)

    def grouped_linear(self, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Rows of x [N, in], sorted by expert with counts [E] rows each, times weight [E, out, in] -> [N, out].

        On GPU in bf16 the counts stay on the device; elsewhere they are read on the host. Rows behind those of the last
        expert give zeros, or on a GPU in bf16 whatever is there.
        """
        if x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] > 0:
            ends = counts.to(x.device, non_blocking=True).cumsum(0).to(torch.int32)
            return GroupedLinear.apply(x, weight, ends)
        rows = counts.tolist()
        rest = x.shape[0] - sum(rows)
        parts = [F.linear(part, w) for part, w in zip(x.split([*rows, rest]), weight.unbind(0))]
        if rest:
            parts.append(x.new_zeros(rest, weight.shape[1]))
        return torch.cat(parts) if parts else x.new_zeros(0, weight.shape[1])
