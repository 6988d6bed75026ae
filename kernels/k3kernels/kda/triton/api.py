"""Buffers, launches and autograd around the KDA kernels."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .kside import kside_kernel
from .kside_hopper import kside_hopper_kernel
from .passes import F32, launch, reverse_pass, state_pass, strides
from .plan import Problem, plan
from .prep import prep_kernel
from .prep_hopper import invert_kernel, prep_hopper_kernel
from .vside import vside_kernel
from .vside_hopper import vside_hopper_kernel


def _rows(x: Tensor, aligned: bool) -> Tensor:
    """x itself if the kernels can read it in place, else a copy.  All of them want channels next to each other; the
    explicit-layout kernels also 16-byte copies and 32-bit offsets inside a chunk."""
    ok = x.stride(-1) == 1 or x.shape[-1] == 1
    if ok and aligned:
        ok = x.data_ptr() % 16 == 0 and x.stride(1) < 2**24 and all(s % 16 == 0 for s in x.stride()[:3])
    return x if ok else x.clone(memory_format=torch.contiguous_format)


@dataclass
class Saved:
    """Buffers that the forward pass leaves for the backward pass, indexed by tile: Q+, K+, Kb [64, K] (one after the other
    in memory); A, M [64, 64] (likewise);
    Gam [K]; row scalars [8, 64] (beta, 1/|q|, 1/|k|, then three of vside.py); state at the chunk's start [V, K]; V'; and the
    transition matrices of the segments, if the stream was cut."""

    Qp: Tensor
    Kp: Tensor
    Kb: Tensor
    A: Tensor
    M: Tensor
    gam: Tensor
    row: Tensor
    h: Tensor
    vn: Tensor
    moves: Tensor

    @property
    def tiles(self) -> tuple[Tensor, ...]:
        return self.Qp, self.Kp, self.Kb, self.A, self.M, self.gam, self.row

    def tensors(self) -> tuple[Tensor, ...]:
        return *self.tiles, self.h, self.vn, self.moves


def _empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(*shape, dtype=dtype or like.dtype, device=like.device)


def forward(
    p: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    S0: Tensor | None,
    final: bool,
    save: bool,
) -> tuple[Tensor, Tensor | None, Saved]:
    """o, the final state if wanted, and what the backward pass needs (h and V' only with save)."""
    c, n = p.config, p.tiles
    varlen = p.table is not None
    some = max(n, 1)  # a descriptor of no memory is refused
    Qp, Kp, Kb = _empty(q, 3, some, 64, p.K)
    A, M = _empty(q, 2, some, 64, 64)
    s = Saved(
        Qp=Qp,
        Kp=Kp,
        Kb=Kb,
        A=A,
        M=M,
        gam=_empty(q, n, p.K, dtype=F32),
        row=_empty(q, n, 8, 64, dtype=F32),
        h=_empty(q, *((some, p.V, p.K) if save else (0,))),
        vn=_empty(q, *((some, 64, p.V) if save else (0,))),
        moves=_empty(q, 0),
    )
    inputs = (q, k, z, beta, A_log, dt_bias, p.table, s.Qp, s.Kp, s.Kb, s.A)
    sizes = (
        s.gam,
        s.row,
        *strides(q),
        *strides(k),
        *strides(z),
        *strides(beta),
        p.T,
        p.NT,
        p.HV,
        p.scale,
        p.bound or 0.0,
    )
    gate = {"BOUNDED": p.bound is not None, "BS": c.block}
    if c.hopper:
        L = _empty(q, n, 3, 32, 32, dtype=torch.float16)
        launch(prep_hopper_kernel, n, *inputs, L, *sizes, GROUP=p.HV // p.H, K=p.K, VARLEN=varlen, **gate, num_warps=4)
        launch(invert_kernel, n, L, s.row, p.table, s.M, p.HV, VARLEN=varlen, num_warps=1)
    else:
        launch(prep_kernel, n, *inputs, s.M, *sizes, K=p.K, BD=c.prep_bd, **p.meta, **p.gate, num_warps=c.prep_warps)
    o = _empty(v, p.B, p.T, p.HV, p.V)
    ST, s.moves = state_pass(p, s.tiles, v, (o, s.h, s.vn), S0, final, save)
    return o, ST, s


def backward(
    p: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    o: Tensor,
    s: Saved,
    do: Tensor,
    dST: Tensor | None,
    want_dS0: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, z, beta, A_log, dt_bias and, if wanted, of the initial state."""
    c, n = p.config, p.tiles
    varlen = p.table is not None
    dS = _empty(q, max(n, 1), p.V, p.K)
    Y = _empty(q, max(n, 1), 64, p.V)
    dS0 = reverse_pass(p, s.tiles, do, (dS, Y), s.moves, dST, want_dS0)

    dv = _empty(v, p.B, p.T, p.HV, p.V)
    db = _empty(beta, p.B, p.T, p.HV)
    dA, dL = _empty(q, n, 3, 32, 32), _empty(q, n, 3, 32, 32)
    P = _empty(q, n, 3, 64, p.K)
    w = _empty(q, n, p.K, dtype=F32)
    args = (
        v,
        o,
        do,
        p.table,
        Y,
        s.vn,
        s.h,
        dS,
        s.gam,
        s.row,
        dv,
        db,
        dA,
        dL,
        P,
        w,
        *strides(v),
        *strides(do),
        p.T,
        p.NT,
        p.HV,
        p.scale,
    )
    if c.hopper:
        launch(vside_hopper_kernel, n, *args, VARLEN=varlen, num_warps=4)
    else:
        launch(vside_kernel, n, *args, K=p.K, V=p.V, BK=min(p.K, 128), BV=min(p.V, 128), **p.meta, num_warps=4)
    del dS, Y

    group = p.HV // p.H
    dq, dk = (_empty(q, p.B, p.T, p.HV, p.K, dtype=q.dtype if group == 1 else F32) for _ in range(2))
    dz = _empty(z, p.B, p.T, p.HV, p.K)
    pA, pb = (_empty(q, p.NC, p.HV, p.K, dtype=F32) for _ in range(2))
    kside_args = (
        q,
        k,
        z,
        A_log,
        dt_bias,
        p.table,
        P,
        w,
        dA,
        dL,
        s.row,
        dq,
        dk,
        dz,
        pA,
        pb,
        *strides(q),
        *strides(k),
        *strides(z),
        p.T,
        p.NT,
        p.HV,
        p.bound or 0.0,
    )
    gate = {"BOUNDED": p.bound is not None, "BS": c.block}
    if c.hopper:
        launch(kside_hopper_kernel, n * 2, *kside_args, GROUP=group, K=p.K, VARLEN=varlen, **gate, num_warps=4)
    else:
        launch(
            kside_kernel,
            n * (p.K // c.kside_bd),
            *kside_args,
            K=p.K,
            BD=c.kside_bd,
            **p.meta,
            **p.gate,
            num_warps=c.kside_warps,
        )
    if group > 1:
        dq = dq.view(p.B, p.T, p.H, group, p.K).sum(3).to(q.dtype)
        dk = dk.view(p.B, p.T, p.H, group, p.K).sum(3).to(k.dtype)
    return dq, dk, dv, dz, db, pA.sum((0, 2)).to(A_log.dtype), pb.sum(0).to(dt_bias.dtype).view_as(dt_bias), dS0


class _KDA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, z, beta, A_log, dt_bias, S0, p: Problem, final: bool):  # type: ignore[no-untyped-def]
        save = any(ctx.needs_input_grad)
        o, ST, s = forward(p, q, k, v, z, beta, A_log, dt_bias, S0, final, save)
        if save:
            ctx.p = p
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(q, k, v, z, beta, A_log, dt_bias, o, *s.tensors())
        return o, ST

    @staticmethod
    def backward(ctx: Any, do, dST):  # type: ignore[no-untyped-def]
        q, k, v, z, beta, A_log, dt_bias, o, *rest = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else _rows(do, ctx.p.config.hopper)
        dST = None if dST is None else dST.contiguous()
        g = backward(ctx.p, q, k, v, z, beta, A_log, dt_bias, o, Saved(*rest), do, dST, ctx.needs_input_grad[7])
        return *g, None, None


def kda_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    bound: float | None = -5.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Chunked KDA; shapes, units and errors are those of `k3kernels.kda.kda`, which validates the arguments.

    q, k [B, T, H, K] and v [B, T, HV, V] share one dtype, bf16 or fp32.  Tensors are read in place whatever the strides
    of B, T and the heads; channels must lie next to each other (and rows start at multiples of 32 bytes for the
    explicit-layout kernels), else a copy is made.  Returns o [B, T, HV, V] and the final state
    fp32 [N, HV, K, V] or None.
    Never waits for the device; the same inputs give the same bits.
    """
    p = plan(q, v, z, bound, scale, cu_seqlens)
    fast = p.config.hopper
    q, k, v, z = _rows(q, fast), _rows(k, fast), _rows(v, fast), _rows(z, fast)
    S0 = None if initial_state is None else initial_state.contiguous()
    return _KDA.apply(q, k, v, z, beta, A_log.contiguous(), dt_bias.contiguous(), S0, p, output_final_state)
