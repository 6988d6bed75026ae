"""Kimi Delta Attention in plain torch, by chunks: the path that trains on CPU, and the second oracle on GPU.

The activations in front of the recurrence have their own small backwards: with autograd they would cost as much as the
recurrence itself on a CPU.
"""

from typing import Any

import torch
from torch import Tensor

from k3kernels.kda.chunk_core import TILE, ChunkedRecurrence
from k3kernels.kda.chunk_plan import plan_chunks
from k3kernels.kda.naive import L2_EPS, MAX_A_LOG, compute_dtype


class L2Normalize(torch.autograd.Function):
    """x / sqrt(sum x^2 + 1e-6) over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        r = torch.linalg.vecdot(x, x).add_(L2_EPS).rsqrt_().unsqueeze(-1)
        y = x * r
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        y, r = ctx.saved_tensors
        return torch.addcmul(dy, y, torch.linalg.vecdot(y, dy).unsqueeze(-1), value=-1).mul_(r)


class BoundedGate(torch.autograd.Function):
    """g = bound * sigmoid(exp(A_log) (z + dt_bias)); z [T,HV,K], A_log [HV], dt_bias [HV,K]."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float) -> Tensor:
        rate = A_log.clamp(max=MAX_A_LOG).exp().unsqueeze(-1)
        gate = ((z + dt_bias) * rate).sigmoid_()
        ctx.bound = bound
        ctx.save_for_backward(z, A_log, dt_bias, gate)
        return gate * bound

    @staticmethod
    def backward(ctx: Any, dg: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        z, A_log, dt_bias, gate = ctx.saved_tensors
        rate = A_log.clamp(max=MAX_A_LOG).exp().unsqueeze(-1)
        dz = torch.addcmul(gate, gate, gate, value=-1).mul_(dg).mul_(rate * ctx.bound)
        dbias = dz.sum(0)
        dA = (dz * z).sum(0).add_(dbias * dt_bias).sum(-1)
        return dz, dA.masked_fill(A_log > MAX_A_LOG, 0), dbias, None


def activate_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float | None) -> Tensor:
    """Log decay g [T,HV,K] of the raw gate; the formulas are in `naive.log_decay`."""
    if bound is not None:
        return BoundedGate.apply(z, A_log, dt_bias, bound)
    rate = A_log.clamp(max=MAX_A_LOG).exp().unsqueeze(-1)
    return -rate * torch.nn.functional.softplus(z + dt_bias)


def chunk_size(K: int) -> int:
    """Rows of a chunk: small heads are cheapest with one tile, wide ones with few states."""
    return TILE if K <= 64 else 64


def stream_bounds(batch: int, tokens: int, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """Document boundaries in the flat stream of batch * tokens rows."""
    if cu_seqlens is not None:
        return tuple(cu_seqlens.tolist())
    return tuple(range(0, batch * tokens + 1, tokens)) if tokens else (0,) * (batch + 1)


def chunked_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    bound: float | None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence alone on activated inputs, as `naive.naive_recurrence`; all in one dtype, fp32 or fp64.

    bound: a lower bound of every g (down to -5.9) allows tiles of 16 rows at once; None makes no assumption.
    chunk: rows of a chunk, 16 * 2^n; None lets the size of the heads decide.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[-2:]
    plan = plan_chunks(stream_bounds(B, T, cu_seqlens), chunk or chunk_size(K), H, HV, q.device)
    o, final = ChunkedRecurrence.apply(
        q.reshape(B * T, H, K),
        k.reshape(B * T, H, K),
        v.reshape(B * T, HV, V),
        g.reshape(B * T, HV, K),
        beta.reshape(B * T, HV),
        initial_state,
        scale,
        bound,
        plan,
    )
    return o.view(B, T, HV, V), final


def chunked_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    bound: float | None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunked_recurrence` on raw q, k (normalised here), v and beta logits; g [B, T, HV, K] gives the dtype to compute in."""
    o, final = chunked_recurrence(
        L2Normalize.apply(q.to(g.dtype)),
        L2Normalize.apply(k.to(g.dtype)),
        v.to(g.dtype),
        g,
        torch.sigmoid(beta.to(g.dtype)),
        scale=scale,
        bound=bound,
        initial_state=None if initial_state is None else initial_state.to(g.dtype),
        cu_seqlens=cu_seqlens,
        chunk=chunk,
    )
    return o.to(v.dtype), final


def kda_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    bound: float | None,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The whole op by chunks; arguments as in `k3kernels.kda.kda`, already checked."""
    dtype = compute_dtype(q, k, v, z, beta, A_log, dt_bias, initial_state)
    g = activate_gate(z.to(dtype).flatten(0, 1), A_log.to(dtype), dt_bias.to(dtype), bound).view(z.shape)
    o, final = chunked_delta(
        q, k, v, g, beta, scale=scale, bound=bound, initial_state=initial_state, cu_seqlens=cu_seqlens, chunk=chunk
    )
    return o, final if output_final_state else None
