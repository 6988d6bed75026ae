"""Attention residuals over depth (report section 2.2): every sublayer reads a learned softmax mix of block sums.

Sources are the embedding, the sums of completed blocks, and the running sum of the current block. `block` closes a
block every `residual_block` transformer layers, `full` after every sublayer, `off` is the plain residual stream.

On a GPU the mix and the norm behind it are one kernel (`k3kernels.attention_residuals`), and the gradients of a block's
sources are found in one pass for all of its sublayers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from k3kernels.attention_residuals import DepthBlock, first_phase_pays
from k3train.model.context import ModelContext
from k3train.model.parameters import ParameterSpec, annotate, new_parameter


@dataclass
class DepthState:
    """bank: finished sources, each [T_local, d]; partial: the running sum, or None right after a block closed.

    block: the bank as the kernels read it, on a GPU, from the first mix of a block to its last.
    """

    bank: list[torch.Tensor] = field(default_factory=list)
    partial: torch.Tensor | None = None
    block: DepthBlock | None = None

    def sources(self) -> list[torch.Tensor]:
        return self.bank if self.partial is None else [*self.bank, self.partial]

    def close_block(self) -> None:
        assert self.partial is not None
        self.bank = [*self.bank, self.partial]
        self.partial, self.block = None, None

    def opened(self, eps: float, mixes: Sequence[DepthAttention] = ()) -> DepthBlock:
        """The bank for the kernels. mixes: those that will read it together with a running sum; their first phase is
        done here where that saves memory traffic."""
        if self.block is None:
            self.block = DepthBlock(self.bank, eps=eps)
            self.bank = [*self.block.sources]
            if first_phase_pays(len(self.bank), len(mixes)):
                self.block.prepare([m.query for m in mixes], [m.norm_weight for m in mixes])
        return self.block

    def add(self, out: torch.Tensor) -> None:
        self.partial = out if self.partial is None else self.partial + out


def uses_kernels(source: torch.Tensor) -> bool:
    """Whether mixes of such sources run as kernels of their own."""
    return source.is_cuda and source.element_size() < 8


def tensors_before_layer(mode: str, layer: int, block: int) -> int:
    """How many [T, d] tensors the depth state holds in front of global layer `layer` (what a stage border carries)."""
    if mode == "block":
        return 1 + -(-layer // block)
    return 1 + 2 * layer if mode == "full" else 1


def source_ends_before(mode: str, layer: int, block: int) -> bool:
    """Whether the running sum in front of global layer `layer` is a finished source (nothing more is added to it)."""
    return mode == "full" or (mode == "block" and layer % block == 0)


def mix(
    sources: list[torch.Tensor], query: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax_j( rms(v_j) . (norm_weight * query) ) weighted sum of the raw v_j, all in fp32 (spec 4.2).

    sources: n tensors [T, d]; query, norm_weight [d] -> mixed [T, d] in the sources' dtype, weights fp32 [n, T].
    """
    key = norm_weight.float() * query.float()
    scores = []
    for v in sources:
        v32 = v.float()
        scores.append((v32 @ key) * torch.rsqrt(v32.square().mean(-1) + eps))
    weights = torch.softmax(torch.stack(scores), dim=0)
    out = weights[0, :, None] * sources[0].float()
    for w, v in zip(weights[1:], sources[1:]):
        out = torch.addcmul(out, w[:, None], v.float())
    return out.to(sources[0].dtype), weights


class _Mix(torch.autograd.Function):
    """`mix` that saves its sources and the [n, T] weights only: no fp32 copy of a source survives the forward."""

    @staticmethod
    def forward(ctx, query, norm_weight, eps, *sources):  # type: ignore[no-untyped-def]
        out, weights = mix(list(sources), query, norm_weight, eps)
        ctx.save_for_backward(query, norm_weight, weights, *sources)
        ctx.eps = eps
        ctx.mark_non_differentiable(weights)
        return out, weights

    @staticmethod
    def backward(ctx, grad_out, _grad_weights):  # type: ignore[no-untyped-def]
        query, norm_weight, weights, *sources = ctx.saved_tensors
        width = sources[0].shape[-1]
        key = norm_weight.float() * query.float()
        g = grad_out.float()
        inner = torch.stack([(g * v.float()).sum(-1) for v in sources])  # d loss / d weights
        grad_scores = weights * (inner - (weights * inner).sum(0))
        grad_key = torch.zeros_like(key)
        grads = []
        for j, v in enumerate(sources):
            v32 = v.float()
            r = torch.rsqrt(v32.square().mean(-1) + ctx.eps)
            dot = v32 @ key
            gr = grad_scores[j] * r
            grad_key += gr @ v32
            # score = (v . key) r with dr/dv = -r^3 v / d
            grad = torch.outer(gr, key) - (gr * dot * r * r / width)[:, None] * v32
            grads.append(torch.addcmul(grad, weights[j, :, None], g).to(v.dtype))
        grad_query = (grad_key * norm_weight.float()).to(query.dtype)
        grad_norm = (grad_key * query.float()).to(norm_weight.dtype)
        return grad_query, grad_norm, None, *grads


class DepthAttention(nn.Module):
    """One sublayer's query over depth. `acting=False` (layer 0's first sublayer has one source) keeps the vectors
    as buffers: they exist in the format and never receive a gradient."""

    def __init__(self, ctx: ModelContext, name: str, *, acting: bool = True) -> None:
        super().__init__()
        self.ctx, self.name, self.acting = ctx, name, acting
        width = ctx.model.hidden_size
        for key, init in (("query", "zeros"), ("norm_weight", "ones")):
            spec = ParameterSpec((width,), init=init)
            if acting:
                partial = ctx.layout.sizes.sequence_parallel
                self.register_parameter(key, new_parameter(spec, ctx.layout, ctx.dtype, sum_over_tensor=partial))
            else:
                self.register_buffer(key, annotate(torch.empty(width, dtype=ctx.dtype), spec))

    def forward(self, state: DepthState) -> torch.Tensor:
        sources = state.sources()
        if len(sources) == 1:
            return sources[0]
        out, weights = _Mix.apply(self.query, self.norm_weight, self.ctx.model.norm_eps, *sources)
        self.ctx.record(f"depth.{self.name}", weights)
        self.ctx.record(f"mix.{self.name}", out)
        return out

    def read(self, state: DepthState, norm: nn.Module, mixes: Sequence[DepthAttention] = ()) -> torch.Tensor:
        """The mix and then `norm` (an RMS norm with `weight` and `eps`) as one kernel, [T, d]; see `DepthState.opened`
        for `mixes`."""
        sources = state.sources()
        if len(sources) == 1:
            return norm(sources[0])
        eps = self.ctx.model.norm_eps
        if self.ctx.probe is not None and not self.ctx.recomputing:
            with torch.no_grad():
                out, weights = mix(sources, self.query, self.norm_weight, eps)
            self.ctx.record(f"depth.{self.name}", weights)
            self.ctx.record(f"mix.{self.name}", out)
        block = state.opened(eps, () if self.ctx.recomputing else mixes)
        x, state.partial = block.mix(
            state.partial, self.query, self.norm_weight, output_weight=norm.weight, output_eps=norm.eps
        )  # type: ignore[arg-type]
        return x
