"""Buffers, launch parameters and autograd around the KDA kernels."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .index import chunk_table
from .kside import kside_kernel
from .kside_hopper import kside_hopper_kernel
from .prep import prep_kernel
from .prep_hopper import invert_kernel, prep_hopper_kernel
from .reverse import reverse_kernel
from .state import state_kernel
from .state_hopper import reverse_hopper_kernel, state_hopper_kernel
from .vside import vside_kernel


def launch(kernel: Any, programs: int, *args: Any, **meta: Any) -> None:
    """One launch; nothing to do for an empty grid."""
    if programs > 0:
        kernel[(programs,)](*args, **meta)


@dataclass(frozen=True)
class Config:
    """Launch parameters: tile sizes and warps of each kernel."""

    prep_bd: int
    prep_warps: int
    state_bv: int
    state_warps: int
    state_stages: int
    reverse_bv: int
    reverse_warps: int
    reverse_stages: int
    vside_warps: int
    kside_bd: int
    kside_warps: int
    hopper: bool = False


def choose(K: int, V: int, dtype: torch.dtype) -> Config:
    """The configuration for a shape.  Pure: the device tests check the gradients of every value it can return."""
    tuned = K == 128 and V == 128 and dtype == torch.bfloat16
    if tuned:
        return Config(16, 2, 128, 8, 2, 128, 8, 2, 4, 32, 2, True)
    bv = min(V, 64 if dtype == torch.bfloat16 and K <= 128 else 32)
    bd = min(K, 32)
    return Config(bd, 2, bv, 4, 1, bv, 4, 1, 4, bd, 2)


def block_size(bound: float | None) -> int:
    """Tokens of a middle-anchored block: the largest whose factors stay below 2^127 (see common.py)."""
    if bound is None:
        return 8
    return 32 if bound >= -5.4 else 16


@dataclass
class Problem:
    """Everything about one call that is not a tensor of the caller."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    NT: int
    NC: int
    bound: float | None
    scale: float
    table: torch.Tensor | None
    doc: torch.Tensor | None
    dtype: torch.dtype

    @property
    def meta(self) -> dict[str, Any]:
        low = self.dtype == torch.bfloat16
        return {
            "VARLEN": self.table is not None,
            "DT": tl.bfloat16 if low else tl.float32,
            "IP": "tf32" if low else "tf32x3",
        }

    @property
    def gate(self) -> dict[str, Any]:
        return {
            "GROUP": self.HV // self.H,
            "BS": block_size(self.bound),
            "BOUNDED": self.bound is not None,
            "HT": tl.float16 if self.dtype == torch.bfloat16 else tl.float32,
        }


def _problem(q: torch.Tensor, v: torch.Tensor, bound: float | None, scale: float | None,
             cu_seqlens: torch.Tensor | None) -> Problem:
    B, T, H, K = q.shape
    HV, V = v.shape[-2:]
    table = doc = None
    nt = (T + 63) // 64
    n, nc = B, B * nt
    if cu_seqlens is not None:
        n = cu_seqlens.numel() - 1
        table, doc, nc = chunk_table(cu_seqlens, T)
    scale = K**-0.5 if scale is None else scale
    return Problem(B, T, H, HV, K, V, n, nt, nc, bound, scale, table, doc, q.dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x itself if its channels are contiguous (other strides are free), else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _st(x: torch.Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


@dataclass
class Saved:
    """Buffers that the forward pass leaves for the backward pass, indexed by tile."""

    Qp: torch.Tensor
    Kp: torch.Tensor
    Kb: torch.Tensor
    A: torch.Tensor
    M: torch.Tensor
    gam: torch.Tensor
    row: torch.Tensor
    h: torch.Tensor
    vn: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.Qp, self.Kp, self.Kb, self.A, self.M, self.gam, self.row, self.h, self.vn


def _empty(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype or like.dtype, device=like.device)


def forward(p: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor,
            A_log: torch.Tensor, dt_bias: torch.Tensor, S0: torch.Tensor | None, final: bool,
            save: bool) -> tuple[torch.Tensor, torch.Tensor | None, Saved]:
    c = choose(p.K, p.V, p.dtype)
    n = p.NC * p.HV
    f = torch.float32
    s = Saved(
        *(_empty(q, n, 64, p.K) for _ in range(3)), _empty(q, n, 64, 64), _empty(q, n, 64, 64),
        _empty(q, n, p.K, dtype=f), _empty(q, n, 8, 64, dtype=f),
        _empty(q, *((n, p.V, p.K) if save else (0,))), _empty(q, *((n, 64, p.V) if save else (0,))),
    )
    if c.hopper and p.bound is not None and block_size(p.bound) == 32:
        L = _empty(q, n, 3, 32, 32, dtype=torch.float16)
        launch(prep_hopper_kernel, n, q, k, z, beta, A_log, dt_bias, p.table, s.Qp, s.Kp, s.Kb, s.A, L, s.gam, s.row,
               *_st(q), *_st(k), *_st(z), *_st(beta), p.T, p.NT, p.HV, p.scale, p.bound,
               GROUP=p.HV // p.H, K=p.K, VARLEN=p.table is not None, num_warps=4)
        launch(invert_kernel, n, L, s.row, p.table, s.M, p.HV, VARLEN=p.table is not None, num_warps=1)
    else:
        launch(prep_kernel, n, q, k, z, beta, A_log, dt_bias, p.table, s.Qp, s.Kp, s.Kb, s.A, s.M, s.gam, s.row,
               *_st(q), *_st(k), *_st(z), *_st(beta), p.T, p.NT, p.HV, p.scale, p.bound or 0.0,
               K=p.K, BD=c.prep_bd, **p.meta, **p.gate, num_warps=c.prep_warps)
    o = _empty(v, p.B, p.T, p.HV, p.V)
    ST = _empty(v, p.N, p.HV, p.K, p.V, dtype=f) if final else None
    if c.hopper:
        launch(state_hopper_kernel, p.N * p.HV * (p.V // c.state_bv), v, p.doc, s.Qp, s.Kp, s.Kb, s.A, s.M, s.gam, s.row,
               S0, o, s.h, s.vn, ST, *_st(v), p.T, p.NT, p.HV, V=p.V, BV=c.state_bv, HAS_S0=S0 is not None, SAVE=save,
               FINAL=final, VARLEN=p.table is not None, NW=c.state_warps, num_warps=c.state_warps)
        return o, ST, s
    launch(state_kernel, p.N * p.HV * (p.V // c.state_bv), v, p.doc, s.Qp, s.Kp, s.Kb, s.A, s.M, s.gam, s.row, S0,
           o, s.h, s.vn, ST, *_st(v), p.T, p.NT, p.HV,
           K=p.K, V=p.V, BV=c.state_bv, HAS_S0=S0 is not None, SAVE=save, FINAL=final, **p.meta,
           NS=c.state_stages, num_warps=c.state_warps)
    return o, ST, s


def backward(p: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor,
             A_log: torch.Tensor, dt_bias: torch.Tensor, o: torch.Tensor, s: Saved, do: torch.Tensor,
             dST: torch.Tensor | None, want_dS0: bool) -> tuple[torch.Tensor | None, ...]:
    c = choose(p.K, p.V, p.dtype)
    n = p.NC * p.HV
    f = torch.float32
    dS = _empty(q, n, p.V, p.K)
    Y = _empty(q, n, 64, p.V)
    dS0 = _empty(q, p.N, p.HV, p.K, p.V, dtype=f) if want_dS0 else None
    if c.hopper:
        launch(reverse_hopper_kernel, p.N * p.HV * (p.V // c.reverse_bv), do, p.doc, s.Qp, s.Kp, s.Kb, s.A, s.M, s.gam,
               s.row, dST, dS, Y, dS0, *_st(do), p.T, p.NT, p.HV, V=p.V, BV=c.reverse_bv, HAS_DST=dST is not None,
               DS0=want_dS0, VARLEN=p.table is not None, NW=c.reverse_warps, num_warps=c.reverse_warps)
    else:
        launch(reverse_kernel, p.N * p.HV * (p.V // c.reverse_bv), do, p.doc, s.Qp, s.Kp, s.Kb, s.A, s.M, s.gam, s.row, dST,
               dS, Y, dS0, *_st(do), p.T, p.NT, p.HV,
               K=p.K, V=p.V, BV=c.reverse_bv, HAS_DST=dST is not None, DS0=want_dS0, **p.meta,
               NS=c.reverse_stages, num_warps=c.reverse_warps)
    dv = _empty(v, p.B, p.T, p.HV, p.V)
    db = _empty(beta, p.B, p.T, p.HV)
    dA = _empty(q, n, 3, 32, 32)
    dL = _empty(q, n, 3, 32, 32)
    P = _empty(q, n, 3, 64, p.K)
    w = _empty(q, n, p.K, dtype=f)
    launch(vside_kernel, n, v, o, do, p.table, Y, s.vn, s.h, dS, s.gam, s.row, dv, db, dA, dL, P, w,
           *_st(v), *_st(do), p.T, p.NT, p.HV, p.scale,
           K=p.K, V=p.V, BK=min(p.K, 128), BV=min(p.V, 128), **p.meta, num_warps=c.vside_warps)
    del dS, Y
    group = p.HV // p.H
    gt = q.dtype if group == 1 else f
    dq = _empty(q, p.B, p.T, p.HV, p.K, dtype=gt)
    dk = _empty(q, p.B, p.T, p.HV, p.K, dtype=gt)
    dz = _empty(z, p.B, p.T, p.HV, p.K)
    nk = p.K // c.kside_bd
    pA = _empty(q, p.NC, p.HV, p.K, dtype=f)
    pb = _empty(q, p.NC, p.HV, p.K, dtype=f)
    if c.hopper and p.bound is not None and block_size(p.bound) == 32:
        launch(kside_hopper_kernel, n * 2, q, k, z, A_log, dt_bias, p.table, P, w, dA, dL, s.row, dq, dk, dz, pA, pb,
               *_st(q), *_st(k), *_st(z), p.T, p.NT, p.HV, p.bound,
               GROUP=group, K=p.K, VARLEN=p.table is not None, num_warps=4)
    else:
        launch(kside_kernel, n * nk, q, k, z, A_log, dt_bias, p.table, P, w, dA, dL, s.row, dq, dk, dz, pA, pb,
               *_st(q), *_st(k), *_st(z), p.T, p.NT, p.HV, p.bound or 0.0,
               K=p.K, BD=c.kside_bd, **p.meta, **p.gate, num_warps=c.kside_warps)
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
        if do is None:
            do = torch.zeros_like(o)
        do = _rows(do)
        dST = dST.contiguous() if dST is not None else None
        g = backward(ctx.p, q, k, v, z, beta, A_log, dt_bias, o, Saved(*rest), do, dST, ctx.needs_input_grad[7])
        return *g, None, None


def kda_triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor,
               A_log: torch.Tensor, dt_bias: torch.Tensor, *, bound: float | None = -5.0, scale: float | None = None,
               initial_state: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
               output_final_state: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chunked KDA; shapes, units and errors are those of `k3kernels.kda.kda`, which validates the arguments.

    q, k [B, T, H, K] and v [B, T, HV, V] share one dtype, bf16 or fp32; channels are read with stride 1 (a tensor with
    another channel stride is copied), every other stride is free.  Returns o [B, T, HV, V] and the final state
    fp32 [N, HV, K, V] or None.  Launches 2 kernels forward and 3 backward (one more with cu_seqlens), never waits for
    the device, and gives the same bits for the same inputs.
    """
    p = _problem(q, v, bound, scale, cu_seqlens)
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    q, k, v, z = _rows(q), _rows(k), _rows(v), _rows(z)
    return _KDA.apply(q, k, v, z, beta, A_log.contiguous(), dt_bias.contiguous(), initial_state, p, output_final_state)
