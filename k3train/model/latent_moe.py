"""Stable LatentMoE (report equations 11-13; spec section 5): routed experts at a latent width, shared ones at full.

y = W_up RMSNorm(sum_e p_e E_e(W_down x)) + Shared(x). Tokens travel to their experts at the latent width: to other
ranks through megatron-core's all-to-all dispatcher or an exchange of our own (`parallel.expert_exchange`), within one
rank by our own sort. The weight p_e multiplies the activation in front of w2, as megatron applies it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import nn

from k3kernels import routing
from k3train.model.context import ModelContext, PackedStream
from k3train.model.mlp import GatedMLP
from k3train.model.parameters import ParameterSpec, annotate, new_parameter
from k3train.model.recompute import consumed
from k3train.model.situ import gated_activation
from k3train.parallel.expert_exchange import ExpertExchange


class Router(nn.Module):
    """Sigmoid scores in fp32, selection by score plus bias, weights from the scores alone.

    `bias` fp32 [E] is a buffer without gradient. `counts` int64 [E, bins] and `load` int64 [E] add up in place over the
    micro-batches of a step and are not saved; `gradients.balance` reads them and sets them to zero.
    """

    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__()
        self.ctx, self.layer = ctx, layer
        moe = ctx.model.moe
        self.weight = new_parameter(
            ParameterSpec((moe.experts, ctx.model.hidden_size), std=ctx.model.init_std), ctx.layout, ctx.dtype,
            sum_over_tensor=ctx.layout.sizes.sequence_parallel,
        )  # fmt: skip
        bias = torch.empty(moe.experts, dtype=torch.float32)
        self.register_buffer("bias", annotate(bias, ParameterSpec((moe.experts,), init="zeros")))
        self.counts: torch.Tensor | None = None
        self.load: torch.Tensor | None = None
        self.forced: torch.Tensor | None = None  # int64 [T, k]: selections to use instead (comparisons across dtypes)

    def forward(self, x: torch.Tensor, stream: PackedStream) -> tuple[torch.Tensor, torch.Tensor]:
        """[T_local, d] -> weights fp32 [T_local, k] and experts int64 [T_local, k]."""
        model, moe = self.ctx.model, self.ctx.model.moe
        logits = routing.product_fp32(x, self.weight)
        weights, experts, cut, cut_expert = routing.route(
            logits, self.bias, moe.top_k, renormalize=moe.renormalize, scale=moe.routed_scale
        )
        counting = self.training and torch.is_grad_enabled() and not self.ctx.recomputing  # each token once
        scored = self.ctx.probe is not None or (model.balancing == "aux_loss" and self.training)
        scores = torch.sigmoid(logits) if scored or self.forced is not None else logits
        if self.forced is not None:
            experts = self.forced
            weights = routing.weigh(scores, experts, moe.renormalize, moe.routed_scale)
        if counting:
            self.count(experts, logits.detach(), cut, cut_expert, stream)
        if model.balancing == "aux_loss" and self.training:
            weights = self.with_auxiliary_loss(weights, scores, experts, stream)
        if self.ctx.probe is not None:
            self.ctx.record(f"router.{self.layer}.scores", scores)
            self.ctx.record(f"router.{self.layer}.experts", experts.sort(-1).values)
            self.ctx.record(f"router.{self.layer}.weights", dense(weights, experts, moe.experts)[0])
        return weights, experts

    def valid(self, stream: PackedStream) -> torch.Tensor | None:
        """bool [T_local]: the tokens this router sees that are no padding; None where all are."""
        valid, layout = stream.valid, self.ctx.layout
        if valid is None or not layout.sizes.sequence_parallel:
            return valid
        return valid.chunk(layout.sizes.tensor)[layout.tp.rank()]

    def tokens_of(self, experts: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens routed to each expert, int64 [E]; those with valid[t] False are left out."""
        return routing.expert_counts(experts, self.ctx.model.moe.experts, valid=valid)

    @torch.no_grad()
    def count(
        self, experts: torch.Tensor, logits: torch.Tensor, cut: torch.Tensor, cut_expert: torch.Tensor,
        stream: PackedStream,
    ) -> None:  # fmt: skip
        """Add a micro-batch to `load` and to the balancing histogram.

        experts int [T, k]; logits fp32 [T, E]; cut [T] and cut_expert [T]: the best score that was not selected, bias
        included, and whose it was.
        """
        moe, valid = self.ctx.model.moe, self.valid(stream)
        if self.load is None:
            self.load = torch.zeros(moe.experts, dtype=torch.int64, device=experts.device)
        self.load += self.tokens_of(experts, valid)
        if self.ctx.model.balancing == "quantile":
            if self.counts is None:
                self.counts = torch.zeros(moe.experts, moe.balancing.bins, dtype=torch.int64, device=experts.device)
            routing.required_bias_counts(logits, self.bias, cut, cut_expert, self.counts, valid=valid)

    def forget(self) -> None:
        """Nothing has been counted."""
        for counted in (self.load, self.counts):
            if counted is not None:
                counted.zero_()

    def with_auxiliary_loss(
        self, weights: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor, stream: PackedStream
    ) -> torch.Tensor:
        """Switch-style loss E * sum_e f_e P_e of a micro-batch, summed over tokens like the main loss is.

        f_e, the routed share of expert e, is the whole micro-batch's, which context and tensor ranks hold together;
        P_e is linear in the tokens, so each rank adds its own.
        """
        moe, layout, valid = self.ctx.model.moe, self.ctx.layout, self.valid(stream)
        share = scores / scores.sum(-1, keepdim=True)
        if valid is not None:
            share = torch.where(valid[:, None], share, 0.0)
        routed = self.tokens_of(experts, valid)
        group = layout.groups.tp_cp if layout.sizes.sequence_parallel else layout.cp
        if group.size() > 1:
            dist.all_reduce(routed, group=group)
        fraction = routed / routed.sum().clamp_min(1)
        loss = moe.experts * (fraction * share.sum(0)).sum()
        return MoEAuxLossAutoScaler.apply(weights, loss * moe.balancing.aux_coefficient)


class Experts(nn.Module):
    """This rank's experts as three stacked parameters: w1 (gate), w3 (up) [E_local, hidden, latent], w2 (down)."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        self.ctx = ctx
        moe = ctx.model.moe
        latent = moe.latent or ctx.model.hidden_size

        def stacked(out: int, inputs: int) -> nn.Module | nn.Parameter:
            spec = ParameterSpec((moe.experts, out, inputs), expert=True, std=ctx.model.init_std)
            return ctx.backend.expert_weight(ctx, spec)

        self.w1 = stacked(moe.expert_hidden, latent)
        self.w3 = stacked(moe.expert_hidden, latent)
        self.w2 = stacked(latent, moe.expert_hidden)

    def forward(
        self, z: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor, again: torch.Tensor | None = None
    ) -> torch.Tensor:
        """z [N, latent] sorted by expert, counts int [E_local], probs fp32 [N] -> [N, latent].

        again: z once more, for w3, from one who adds the gradients of the two himself (`routing.dispatch_twice`).
        Rows behind the last expert's, where there are any, belong to nobody, and what comes out there means nothing.
        """
        linear = self.ctx.backend.grouped_linear

        def activate(gate: torch.Tensor, up: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
            return gated_activation(self.ctx.model, gate, up, probs)

        return consumed(
            self.ctx, "units", activate, linear(z, self.w1, counts),
            linear(z if again is None else again, self.w3, counts), probs,
            by=lambda hidden: linear(hidden, self.w2, counts), fused=z.is_cuda,
        )  # fmt: skip


class LatentMoE(nn.Module):
    """[T_local, d] -> [T_local, d]; experts are split over expert-parallel ranks."""

    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__()
        self.ctx, self.layer = ctx, layer
        moe, width = ctx.model.moe, ctx.model.hidden_size
        self.router = Router(ctx, layer)
        if moe.latent is not None:
            self.latent_down = ctx.backend.replicated(ctx, width, moe.latent)
            self.latent_up = ctx.backend.replicated(ctx, moe.latent, width)
            if moe.latent_norm:
                self.latent_norm = ctx.backend.norm(ctx, moe.latent, eps=ctx.model.norm_eps)
        self.experts = Experts(ctx)
        if moe.shared_experts:
            self.shared_experts = GatedMLP(ctx, moe.shared_experts * moe.expert_hidden)
        self.exchange: ExpertExchange | None = None
        self.dispatcher: MoEAlltoAllTokenDispatcher | None = None
        if ctx.layout.sizes.expert > 1 and ctx.exchange.kind != "megatron":
            self.exchange = ExpertExchange(ctx.exchange, ctx.layout.ep, moe.experts)
        elif ctx.layout.sizes.expert > 1:
            local = moe.experts // ctx.layout.sizes.expert
            first = ctx.layout.ep.rank() * local
            self.dispatcher = MoEAlltoAllTokenDispatcher(
                local, list(range(first, first + local)), config=ctx.megatron, pg_collection=ctx.layout.groups
            )

    def forward(self, x: torch.Tensor, stream: PackedStream) -> torch.Tensor:
        moe = self.ctx.model.moe
        weights, experts = self.router(x, stream)
        if self.exchange is None:
            z, shared = self.project(x)
            out = self.routed(z, weights, experts)
        else:
            z = x if moe.latent is None else self.latent_down(x)
            out, shared = self.exchanged(self.exchange, z, weights, experts, x)
        if moe.latent is not None:
            if moe.latent_norm:
                out = consumed(self.ctx, "norms", self.latent_norm, out, by=self.latent_up)
            else:
                out = self.latent_up(out)
        return out if shared is None else out + shared()

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, Callable[[], torch.Tensor] | None]:
        """x [T_local, d] -> what routed experts read [T_local, latent], and the rest of the shared experts, if there are any."""
        latent, asked = self.ctx.model.moe.latent is not None, []
        if latent:
            asked.append((self.latent_down, x))
        if self.ctx.model.moe.shared_experts:
            entered = self.ctx.layout.enter_tensor_parallel(x)
            asked += [(self.shared_experts.gate_proj, entered), (self.shared_experts.up_proj, entered)]
        found = self.ctx.backend.products(asked)
        z = found.pop(0) if latent else x
        return z, (lambda: self.shared_experts.activated(*found)()) if found else None

    def exchanged(
        self, exchange: ExpertExchange, z: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, Callable[[], torch.Tensor] | None]:
        """`routed` through our own exchange, and the shared experts of x. With overlap these are done already: gate and up
        while rows went out, down while they came home."""
        overlap = exchange.plan.overlap and self.ctx.model.moe.shared_experts > 0
        # a host that reads sizes may wait where nothing is trained; there no step can be done again either
        journey = exchange.depart(z, weights, experts, exact=not self.training)
        finish = self.shared_experts.begin(x) if overlap else None
        tokens, counts, probs = journey.arrive()
        journey.send_back(self.experts(tokens, counts, probs))
        if finish is None:
            return journey.home(), (lambda: self.shared_experts(x)) if self.ctx.model.moe.shared_experts else None
        done = finish()
        return journey.home(), lambda: done

    def routed(self, z: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Dispatch, experts, combine: [T_local, latent] -> [T_local, latent].

        All experts on this rank: rows are sorted by expert on the device, in shapes that do not depend on the routes.
        Else they travel through megatron's dispatcher, which must know on the host how much each rank sends.
        """
        if self.dispatcher is None:
            order = routing.make_permutation(experts, self.ctx.model.moe.experts)
            tokens, again, probs = routing.dispatch_twice(z, weights, order)
            return routing.combine(self.experts(tokens, order.counts, probs, again), order)
        d = self.dispatcher
        probs, selected = dense(weights, experts, self.ctx.model.moe.experts)
        tokens, probs = d.dispatch_preprocess(z, selected, probs)
        tokens, probs = d.token_dispatch(tokens, probs)
        tokens, counts, probs = d.dispatch_postprocess(tokens, probs)
        out = self.experts(tokens, counts, probs)
        out = d.combine_preprocess(out)
        out = d.token_combine(out)
        return d.combine_postprocess(out).view(z.shape)


def dense(weights: torch.Tensor, experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts [T, k] over all experts: weights [T, E], zero where not selected, and selection bool [T, E]."""
    shape = (experts.shape[0], count)
    selected = torch.zeros(shape, dtype=torch.bool, device=experts.device).scatter_(1, experts, True)
    return torch.zeros(shape, dtype=weights.dtype, device=weights.device).scatter(1, experts, weights), selected
