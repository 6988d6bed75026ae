"""Linear attention in matrix products over chunks, with a hand-written backward; CPU and GPU tensors.

For one chunk, S the state at its start:  O = s (tril(Q K^T) V + Q S),  S <- S + K^T V.
"""

from typing import Any

import torch
from torch import Tensor

from k3kernels.kda.chunk_plan import ChunkPlan, plan_chunks
from k3kernels.kda.chunk_torch import L2Normalize, stream_bounds
from k3kernels.kda.naive import compute_dtype


class ChunkedLinearAttention(torch.autograd.Function):
    """On flat streams: q, k [T,H,K] normalised, v [T,HV,V], state [N,HV,K,V], all of one dtype."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None, scale: float, plan: ChunkPlan
    ) -> tuple[Tensor, Tensor]:
        (T, H, K), (HV, V) = q.shape, v.shape[1:]
        ctx.shapes, ctx.scale, ctx.plan, ctx.has_state = (T, H, HV, K, V), scale, plan, initial_state is not None
        shape = (plan.documents, HV, K, V)
        if plan.chunks == 0:
            ctx.save_for_backward()
            return v.new_zeros(T, HV, V), v.new_zeros(shape) if initial_state is None else initial_state.clone()
        qc, kc = plan.to_chunks(q, keys=True), plan.to_chunks(k, keys=True)
        vc = plan.clear_padding(plan.to_chunks(v))
        writes = kc.mT @ vc
        S = v.new_zeros(plan.live * HV, K, V) if initial_state is None else plan.enter(initial_state)
        states = torch.empty_like(writes)
        ended = []
        for i, (begin, end) in enumerate(plan.steps):
            rows = slice(begin * HV, end * HV)
            states[rows] = S
            S = S + writes[rows]
            remaining = plan.remaining(i) * HV
            ended.append(S[remaining:])
            S = S[:remaining]
        final = plan.leave(torch.cat(ended[::-1]), initial_state, shape)
        A = torch.tril(qc @ kc.mT).mul_(scale)
        o = torch.baddbmm(A @ vc, qc, states, alpha=scale)
        ctx.save_for_backward(qc, kc, vc, A, states)
        return plan.to_stream(o, HV, HV), final

    @staticmethod
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        plan, scale = ctx.plan, ctx.scale
        T, H, HV, K, V = ctx.shapes
        if plan.chunks == 0:
            zeros = [do.new_zeros(T, heads, size) for heads, size in ((H, K), (H, K), (HV, V))]
            return *zeros, dfinal if ctx.has_state else None, None, None
        qc, kc, vc, A, states = ctx.saved_tensors
        doc = plan.clear_padding(plan.to_chunks(do))
        reads = torch.bmm(qc.mT, doc).mul_(scale)
        dended = plan.enter(dfinal)
        dstates = torch.empty_like(states)
        dS = dended[:0]
        for begin, end in reversed(plan.steps):
            rows = slice(begin * HV, end * HV)
            dS = torch.cat([dS, dended[dS.shape[0] : (end - begin) * HV]])
            dstates[rows] = dS
            dS = dS + reads[rows]
        dinitial = plan.leave(dS, dfinal, (plan.documents, HV, K, V)) if ctx.has_state else None
        dA = torch.tril(doc @ vc.mT).mul_(scale)
        dq = torch.baddbmm(dA @ kc, doc, states.mT, alpha=scale)
        dk = torch.baddbmm(dA.mT @ qc, vc, dstates.mT)
        dv = torch.baddbmm(A.mT @ doc, kc, dstates)
        return (
            plan.to_stream(dq, HV, H),
            plan.to_stream(dk, HV, H),
            plan.to_stream(dv, HV, HV),
            dinitial,
            None,
            None,
        )


def linear_attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments as in `linear_attention`, already checked."""
    dtype = compute_dtype(q, k, v, initial_state)
    (B, T, H, K), (HV, V) = q.shape, v.shape[-2:]
    # A chunk costs C^2 work and saves a K x V state: small heads want small chunks.
    chunk = 32 if K <= 32 else 64 if q.device.type == "cpu" else 128
    plan = plan_chunks(stream_bounds(B, T, cu_seqlens), chunk, H, HV, q.device)
    o, final = ChunkedLinearAttention.apply(
        L2Normalize.apply(q.to(dtype)).reshape(B * T, H, K),
        L2Normalize.apply(k.to(dtype)).reshape(B * T, H, K),
        v.to(dtype).reshape(B * T, HV, V),
        None if initial_state is None else initial_state.to(dtype),
        scale,
        plan,
    )
    return o.view(B, T, HV, V).to(v.dtype), final
