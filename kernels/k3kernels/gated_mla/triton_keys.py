"""Keys and values of Gated MLA on a GPU, each way in one pass: a program has a token's heads, whose rows follow each other.

Columns are cut where the parts of a row meet, so that every tile is read and written in whole 16-byte pieces.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.peaks import PEAKS
from k3kernels.triton_peaks import raise_peak

HEADS = 32  # of a tile, at most
PER_WARP = 1024  # elements of the widest tile: two or more pieces of 16 bytes a lane are on their way at a time


@triton.jit
def forward_kernel(
    kv_ptr, shared_ptr, k_ptr, v_ptr, shared_step,
    H: tl.constexpr, N: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Grid (T, ceil(H / BH)). kv [T, H, N + V], k [T, H, N + S], v [T, H, V] contiguous; shared [T, S] with a row stride."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)[:, None]
    own, common, value = tl.arange(0, BN)[None, :], tl.arange(0, BS)[None, :], tl.arange(0, BV)[None, :]
    kv_ptr += token * (H * (N + V)) + head * (N + V)
    k_ptr += token * (H * (N + S)) + head * (N + S)
    v_ptr += token * (H * V) + head * V
    in_n, in_s, in_v = (head < H) & (own < N), (head < H) & (common < S), (head < H) & (value < V)
    # all that is read before anything is written: a load does not pass a store
    k = tl.load(kv_ptr + own, mask=in_n)
    v = tl.load(kv_ptr + N + value, mask=in_v)
    shared = tl.load(shared_ptr + token * shared_step + common, mask=common < S)
    tl.store(k_ptr + own, k, mask=in_n)
    tl.store(v_ptr + value, v, mask=in_v)
    tl.store(k_ptr + N + common, tl.broadcast_to(shared, [BH, BS]), mask=in_s)


@triton.jit
def backward_kernel(
    dk_ptr, dv_ptr, dkv_ptr, dshared_ptr, peak_ptr, dk_step, dk_head, dv_step, dv_head,
    H: tl.constexpr, N: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Grid (T,). dk [T, H, N + S], dv [T, H, V] with strides of tokens and heads; dkv [T, H, N + V], dshared [T, S]
    contiguous. dk and dv may be None, for zeros; dshared is None with dk. peak fp32 [SLOTS] of dkv, or None."""
    token = tl.program_id(0).to(tl.int64)
    own, common, value = tl.arange(0, BN)[None, :], tl.arange(0, BS)[None, :], tl.arange(0, BV)[None, :]
    kind: tl.constexpr = dkv_ptr.dtype.element_ty
    dkv_ptr += token * (H * (N + V))
    total = tl.zeros([BH, BS], tl.float32)
    peak = tl.zeros([BH], tl.float32)
    for first in range(0, H, BH):
        head = first + tl.arange(0, BH)[:, None]
        in_n, in_s, in_v = (head < H) & (own < N), (head < H) & (common < S), (head < H) & (value < V)
        dk, dv = tl.zeros([BH, BN], kind), tl.zeros([BH, BV], kind)
        if dk_ptr is not None:
            from_k = dk_ptr + token * dk_step + head.to(tl.int64) * dk_head
            dk = tl.load(from_k + own, mask=in_n, other=0.0).to(kind)
            total += tl.load(from_k + N + common, mask=in_s, other=0.0).to(tl.float32)
        if dv_ptr is not None:
            from_v = dv_ptr + token * dv_step + head.to(tl.int64) * dv_head
            dv = tl.load(from_v + value, mask=in_v, other=0.0).to(kind)
        tl.store(dkv_ptr + head * (N + V) + own, dk, mask=in_n)
        tl.store(dkv_ptr + head * (N + V) + N + value, dv, mask=in_v)
        if peak_ptr is not None:
            of_k, of_v = tl.max(tl.abs(dk.to(tl.float32)), 1), tl.max(tl.abs(dv.to(tl.float32)), 1)
            peak = tl.maximum(peak, tl.maximum(of_k, of_v))
    if dk_ptr is not None:
        at = tl.arange(0, BS)
        tl.store(dshared_ptr + token * S + at, tl.sum(total, 0).to(kind), mask=at < S)
    if peak_ptr is not None:
        raise_peak(peak_ptr, peak, kind)


def _options(H: int, N: int, S: int, V: int) -> dict[str, int]:
    """Sizes, tiles and warps of both kernels."""
    BH, BN, BS, BV = min(HEADS, triton.next_power_of_2(H)), *(triton.next_power_of_2(n) for n in (N, S, V))
    warps = min(8, max(1, BH * max(BN, BV) // PER_WARP))
    return {"H": H, "N": N, "S": S, "V": V, "BH": BH, "BN": BN, "BS": BS, "BV": BV, "num_warps": warps}


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class TritonKeys(torch.autograd.Function):
    """kv [T, H, nope_dim + v], shared [T, s] -> k [T, H, nope_dim + s], v [T, H, v]."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, shared: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        (T, H, width), S = kv.shape, shared.shape[1]
        V = width - nope_dim
        ctx.sizes, ctx.kind = (T, H, nope_dim, S, V), {"dtype": kv.dtype, "device": kv.device}
        k, v = torch.empty(T, H, nope_dim + S, **ctx.kind), torch.empty(T, H, V, **ctx.kind)
        if kv.numel():
            kv, shared, options = kv.contiguous(), _last_contiguous(shared), _options(H, nope_dim, S, V)
            forward_kernel[(T, triton.cdiv(H, options["BH"]))](kv, shared, k, v, shared.stride(0), **options)
        return k, v

    @staticmethod
    def backward(ctx: Any, dk: Tensor | None, dv: Tensor | None) -> tuple[Tensor | None, ...]:
        if dk is None and dv is None:
            return None, None, None
        T, H, N, S, V = ctx.sizes
        dkv = torch.empty(T, H, N + V, **ctx.kind)
        dshared = None if dk is None else torch.empty(T, S, **ctx.kind)
        dk, dv = (None if g is None else _last_contiguous(g) for g in (dk, dv))
        strides = [n for g in (dk, dv) for n in ((0, 0) if g is None else g.stride()[:2])]
        peak = PEAKS.slots(dkv.device)
        if dkv.numel():
            backward_kernel[(T,)](dk, dv, dkv, dshared, peak, *strides, **_options(H, N, S, V))
        PEAKS.note(dkv, peak)
        return dkv, dshared, None
