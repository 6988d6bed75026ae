"""The chunk-parallel kernels of a call and the buffers between them; the serial ones are in passes.py."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .kside import kside_kernel
from .kside_hopper import kside_hopper_kernel
from .launch import launch
from .passes import F32, strides
from .plan import Problem
from .prep import prep_kernel
from .prep_hopper import invert_kernel, prep_hopper_kernel
from .vside import vside_kernel
from .vside_hopper import vside_hopper_kernel


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(*shape, dtype=dtype or like.dtype, device=like.device)


@dataclass
class Inputs:
    """q, k [B, T, H, K], v [B, T, HV, V], z [B, T, HV, K], beta [B, T, HV] logits; A_log [HV], dt_bias [HV, K]."""

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor

    def part(self, rows: slice) -> "Inputs":
        """Views of some tokens."""
        q, k, v, z, beta = (t[:, rows] for t in (self.q, self.k, self.v, self.z, self.beta))
        return Inputs(q, k, v, z, beta, self.A_log, self.dt_bias)


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

    @classmethod
    def new(cls, p: Problem, like: Tensor, save: bool) -> "Saved":
        """h and V' only with save."""
        n = p.tiles
        some = max(n, 1)  # a descriptor of no memory is refused
        Qp, Kp, Kb = empty(like, 3, some, 64, p.K)
        A, M = empty(like, 2, some, 64, 64)
        return cls(
            Qp=Qp,
            Kp=Kp,
            Kb=Kb,
            A=A,
            M=M,
            gam=empty(like, n, p.K, dtype=F32),
            row=empty(like, n, 8, 64, dtype=F32),
            h=empty(like, *((some, p.V, p.K) if save else (0,))),
            vn=empty(like, *((some, 64, p.V) if save else (0,))),
            moves=empty(like, 0),
        )

    @property
    def tiles(self) -> tuple[Tensor, ...]:
        return self.Qp, self.Kp, self.Kb, self.A, self.M, self.gam, self.row

    def tensors(self) -> tuple[Tensor, ...]:
        return *self.tiles, self.h, self.vn, self.moves

    def part(self, tiles: slice) -> "Saved":
        """Views of some tiles."""
        return Saved(*(getattr(self, f.name)[tiles] for f in fields(self)))


def prep(p: Problem, x: Inputs, s: Saved) -> None:
    """Everything of the forward pass that needs no state: fills s up to the row scalars."""
    c, n = p.config, p.tiles
    varlen = p.table is not None
    inputs = (x.q, x.k, x.z, x.beta, x.A_log, x.dt_bias, p.table, s.Qp, s.Kp, s.Kb, s.A)
    sizes = (
        s.gam,
        s.row,
        *strides(x.q),
        *strides(x.k),
        *strides(x.z),
        *strides(x.beta),
        p.T,
        p.NT,
        p.HV,
        p.scale,
        p.bound or 0.0,
    )
    gate = {"BOUNDED": p.bound is not None, "BS": c.block}
    if c.hopper:
        L = empty(x.q, n, 3, 32, 32, dtype=torch.float16)
        launch(prep_hopper_kernel, n, *inputs, L, *sizes, GROUP=p.HV // p.H, K=p.K, VARLEN=varlen, **gate, num_warps=4)
        launch(invert_kernel, n, L, s.row, p.table, s.M, p.HV, VARLEN=varlen, num_warps=1)
    else:
        launch(prep_kernel, n, *inputs, s.M, *sizes, K=p.K, BD=c.prep_bd, **p.meta, **p.gate, num_warps=c.prep_warps)


@dataclass
class Products:
    """What vside leaves for kside, by tile: gradients of A and L (three [32, 32] blocks each), products with states
    [3, 64, K], and what the gates of a whole chunk share [K]."""

    dA: Tensor
    dL: Tensor
    P: Tensor
    w: Tensor


def vside(
    p: Problem, x: Inputs, o: Tensor, do: Tensor, s: Saved, dS: Tensor, Y: Tensor, dv: Tensor, db: Tensor
) -> Products:
    """Fills dv, dbeta and three rows of the row scalars."""
    c, n = p.config, p.tiles
    varlen = p.table is not None
    out = Products(
        empty(x.q, n, 3, 32, 32),
        empty(x.q, n, 3, 32, 32),
        empty(x.q, n, 3, 64, p.K),
        empty(x.q, n, p.K, dtype=F32),
    )
    args = (
        x.v,
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
        out.dA,
        out.dL,
        out.P,
        out.w,
        *strides(x.v),
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
    return out


@dataclass
class KeyGradients:
    """dq, dk (fp32 per value head where heads share q and k), dz, and a chunk's parts of dA_log and ddt_bias [NC, HV, K]."""

    dq: Tensor
    dk: Tensor
    dz: Tensor
    pA: Tensor
    pb: Tensor

    @classmethod
    def new(cls, p: Problem, x: Inputs) -> "KeyGradients":
        shape = (p.B, p.T, p.HV, p.K)
        low = x.q.dtype if p.HV == p.H else F32
        return cls(
            empty(x.q, *shape, dtype=low),
            empty(x.q, *shape, dtype=low),
            empty(x.z, *shape),
            empty(x.q, p.NC, p.HV, p.K, dtype=F32),
            empty(x.q, p.NC, p.HV, p.K, dtype=F32),
        )

    def part(self, rows: slice, chunks: slice) -> "KeyGradients":
        dq, dk, dz = (t[:, rows] for t in (self.dq, self.dk, self.dz))
        return KeyGradients(dq, dk, dz, self.pA[chunks], self.pb[chunks])


def kside(p: Problem, x: Inputs, s: Saved, products: Products, out: KeyGradients) -> None:
    """Fills out."""
    c, n = p.config, p.tiles
    args = (
        x.q,
        x.k,
        x.z,
        x.A_log,
        x.dt_bias,
        p.table,
        products.P,
        products.w,
        products.dA,
        products.dL,
        s.row,
        out.dq,
        out.dk,
        out.dz,
        out.pA,
        out.pb,
        *strides(x.q),
        *strides(x.k),
        *strides(x.z),
        p.T,
        p.NT,
        p.HV,
        p.bound or 0.0,
    )
    if c.hopper:
        gate = {"BOUNDED": p.bound is not None, "BS": c.block}
        meta = {"GROUP": p.HV // p.H, "K": p.K, "VARLEN": p.table is not None}
        launch(kside_hopper_kernel, n * 2, *args, **meta, **gate, num_warps=4)
    else:
        programs = n * (p.K // c.kside_bd)
        launch(kside_kernel, programs, *args, K=p.K, BD=c.kside_bd, **p.meta, **p.gate, num_warps=c.kside_warps)
