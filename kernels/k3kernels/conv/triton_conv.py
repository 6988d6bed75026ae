"""The short convolution on a GPU: up to three tensors (q, k, v) in one launch, forward and backward, widths up to 4.

A program owns BC channels and walks down BT rows with the last three inputs in registers, so every row is read once
(but for a halo of three at the block's ends). The backward walks the same way, recomputes the sum in front of SiLU, and
carries the three input gradients that are still incomplete. dweight is summed per block of rows in fp32 and over the
blocks afterwards: bitwise the same in every run.

Only a document's first W - 1 tokens see its initial state, or fewer than W inputs. A block decides by one scalar whether it
has such a token; the others, nearly all, walk without asking where documents begin. Both spell their multiply-adds out: left
to a compiler, which product of a sum is fused differs between the two, and with it the last bit. States lie as [N, W-1, C] here,
neighbouring channels beside each other: scattered addresses would take registers from every block.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.peaks import PEAKS
from k3kernels.triton_peaks import SLOTS, neighbours_peak, raise_peak

MAX_WIDTH = 4
ROWS = 64
CHANNELS = 256
UNROLL = 4  # rows whose loads are under way together
NEAR_UNROLL = 1  # the same in those blocks of the backward; more would take registers from every block
WARPS = 2


@triton.jit
def _pick(which, a, b, c):
    """One of three pointers of one type."""
    chosen = a
    if which == 1:
        chosen = b
    if which == 2:
        chosen = c
    return chosen


@triton.jit
def _pick_size(which, a, b, c):
    """One of three integers, which may differ in width."""
    return tl.where(which == 2, c, tl.where(which == 1, b, a))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def _tap(weight_ptr, channel, inside, lag: tl.constexpr, W: tl.constexpr):
    """The weight that multiplies the input `lag` tokens back; zero beyond the width."""
    tap = tl.zeros([channel.shape[0]], tl.float32)
    if lag < W:
        tap = tl.load(weight_ptr + channel * W + (W - 1 - lag), mask=inside, other=0.0).to(tl.float32)
    return tap


@triton.jit
def _reach(
    x, state_ptr, C, channel, inside, t, start, lag: tl.constexpr, W: tl.constexpr, STATE: tl.constexpr, NEAR: tl.constexpr
):  # fmt: skip
    """The input `lag` tokens before t: x if it lies in the document, else the initial state's [W-1, C], else zero."""
    seen = x
    if NEAR:
        seen = tl.where(t - lag >= start, x, 0.0)
    if NEAR and STATE and lag < W:
        slot = W - 1 - lag + (t - start)  # oldest first
        old = tl.load(state_ptr + slot * C + channel, mask=inside & (t - lag < start), other=0.0)
        seen += old.to(tl.float32)
    return seen


@triton.jit
def _near_a_start(start_ptr, first, T, VARLEN: tl.constexpr, ROWS: tl.constexpr):
    """Whether any of the rows [first, first + ROWS) lies within three tokens (the widest reach) of its document's start.

    Starts never decrease, so the last row's tells: if it lies before `first` it is the start of every row.
    """
    start = 0
    if VARLEN:
        start = tl.load(start_ptr + tl.minimum(first + ROWS, T) - 1)
    return first < start + 3


@triton.jit
def _forward_rows(
    x_ptr, y_ptr, s_ptr, start_ptr, document_ptr, channel, inside, batch, first, T, C, st,
    tap0, tap1, tap2, tap3, p1, p2, p3,
    W: tl.constexpr, VARLEN: tl.constexpr, STATE: tl.constexpr, NEAR: tl.constexpr, BT: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Rows [first, first + BT) of one block of channels; p1, p2, p3: the inputs before `first`, newest first.

    NEAR: some of them are the first of a document.
    """
    for i in tl.range(0, BT, loop_unroll_factor=UNROLL):
        t = first + i
        live = t < T
        start = 0
        document = batch
        if VARLEN and NEAR:
            start = tl.load(start_ptr + t, mask=live, other=0)
            document = tl.load(document_ptr + t, mask=live, other=0).to(tl.int64)
        at = inside & live
        x = tl.load(x_ptr + tl.cast(t, tl.int64) * st + channel, mask=at, other=0.0).to(tl.float32)
        state = s_ptr + document * C * (W - 1)
        acc = tl.fma(tap1, _reach(p1, state, C, channel, at, t, start, 1, W, STATE, NEAR), tap0 * x)
        acc = tl.fma(tap2, _reach(p2, state, C, channel, at, t, start, 2, W, STATE, NEAR), acc)
        acc = tl.fma(tap3, _reach(p3, state, C, channel, at, t, start, 3, W, STATE, NEAR), acc)
        y = acc * _sigmoid(acc)
        tl.store(y_ptr + tl.cast(t, tl.int64) * C + channel, y.to(y_ptr.dtype.element_ty), mask=at)
        p3 = p2
        p2 = p1
        p1 = x


@triton.jit
def forward_kernel(
    x0, x1, x2, w0, w1, w2, s0, s1, s2, y0, y1, y2, start_ptr, document_ptr, T, blocks_T,
    b0, b1, b2, t0, t1, t2, c0, c1, c2, n0, n1,
    W: tl.constexpr, VARLEN: tl.constexpr, STATE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Grid (B * ceil(T / BT), channel blocks of all three tensors); only the first axis may exceed 65535.

    x [B, T, C] with strides (b, t, 1); y the same, contiguous; n0, n1: channel blocks before tensors 1 and 2.
    start, document [T]: first token and index of each token's document (read when VARLEN). s [N, W-1, C].
    """
    block = tl.program_id(1)
    which = (block >= n0).to(tl.int32) + (block >= n1).to(tl.int32)
    x_ptr, w_ptr, s_ptr, y_ptr = _pick(which, x0, x1, x2), _pick(which, w0, w1, w2), s0, _pick(which, y0, y1, y2)
    if STATE:
        s_ptr = _pick(which, s0, s1, s2)
    C, sb, st = _pick_size(which, c0, c1, c2), _pick_size(which, b0, b1, b2), _pick_size(which, t0, t1, t2)
    channel = (block - _pick_size(which, 0, n0, n1)) * BC + tl.arange(0, BC)
    inside = channel < C
    batch = (tl.program_id(0) // blocks_T).to(tl.int64)
    first = (tl.program_id(0) % blocks_T) * BT
    x_ptr += batch * sb
    y_ptr += batch * T * C
    tap0, tap1 = _tap(w_ptr, channel, inside, 0, W), _tap(w_ptr, channel, inside, 1, W)
    tap2, tap3 = _tap(w_ptr, channel, inside, 2, W), _tap(w_ptr, channel, inside, 3, W)
    p1 = tl.load(x_ptr + (first - 1).to(tl.int64) * st + channel, mask=inside & (first >= 1), other=0.0).to(tl.float32)
    p2 = tl.load(x_ptr + (first - 2).to(tl.int64) * st + channel, mask=inside & (first >= 2), other=0.0).to(tl.float32)
    p3 = tl.load(x_ptr + (first - 3).to(tl.int64) * st + channel, mask=inside & (first >= 3), other=0.0).to(tl.float32)
    if _near_a_start(start_ptr, first, T, VARLEN, BT):
        _forward_rows(
            x_ptr, y_ptr, s_ptr, start_ptr, document_ptr, channel, inside, batch, first, T, C, st,
            tap0, tap1, tap2, tap3, p1, p2, p3, W, VARLEN, STATE, True, BT, UNROLL,
        )  # fmt: skip
    else:
        _forward_rows(
            x_ptr, y_ptr, s_ptr, start_ptr, document_ptr, channel, inside, batch, first, T, C, st,
            tap0, tap1, tap2, tap3, p1, p2, p3, W, VARLEN, STATE, False, BT, UNROLL,
        )  # fmt: skip


@triton.jit
def _backward_rows(
    x_ptr, g_ptr, d_ptr, s_ptr, ds_ptr, start_ptr, document_ptr, channel, inside, batch, first, T, C, st,
    tap0, tap1, tap2, tap3, p1, p2, p3,
    W: tl.constexpr, VARLEN: tl.constexpr, STATE: tl.constexpr, NEAR: tl.constexpr, PEAK: tl.constexpr,
    BT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """dx and ds of rows [first, first + BT) of one block of channels, stored.

    Returns dweight [channels] of each lag, and with PEAK fp32 magnitudes of dx, the largest among them.
    """
    BC: tl.constexpr = channel.shape[0]
    EACH: tl.constexpr = min(4, BC)
    peak = tl.zeros([BC // EACH], tl.float32)
    e1, e2, e3 = tl.zeros([BC], tl.float32), tl.zeros([BC], tl.float32), tl.zeros([BC], tl.float32)
    dw_0, dw_1 = tl.zeros([BC], tl.float32), tl.zeros([BC], tl.float32)
    dw_2, dw_3 = tl.zeros([BC], tl.float32), tl.zeros([BC], tl.float32)
    for i in tl.range(
        0, BT + 3, loop_unroll_factor=UNROLL
    ):  # three rows past the block complete its last rows' gradients
        t = first + i
        live = t < T
        start = 0
        document = batch
        if VARLEN and NEAR:
            start = tl.load(start_ptr + t, mask=live, other=0)
            document = tl.load(document_ptr + t, mask=live, other=0).to(tl.int64)
        at = inside & live
        row = tl.cast(t, tl.int64)
        x = tl.load(x_ptr + row * st + channel, mask=at, other=0.0).to(tl.float32)
        dy = tl.load(g_ptr + row * C + channel, mask=at, other=0.0).to(tl.float32)
        state = s_ptr + document * C * (W - 1)
        r1 = _reach(p1, state, C, channel, at, t, start, 1, W, STATE, NEAR)
        r2 = _reach(p2, state, C, channel, at, t, start, 2, W, STATE, NEAR)
        r3 = _reach(p3, state, C, channel, at, t, start, 3, W, STATE, NEAR)
        acc = tl.fma(tap3, r3, tl.fma(tap2, r2, tl.fma(tap1, r1, tap0 * x)))
        s = _sigmoid(acc)
        da = dy * s * tl.fma(acc, 1.0 - s, 1.0)
        own = tl.where(i < BT, da, 0.0)
        dw_0 = tl.fma(own, x, dw_0)
        dw_1 = tl.fma(own, r1, dw_1)
        dw_2 = tl.fma(own, r2, dw_2)
        dw_3 = tl.fma(own, r3, dw_3)
        if STATE and NEAR:
            place = t - start
            to = ds_ptr + (document * (W - 1) + place) * (W - 1) * C + channel
            for lag in tl.static_range(1, W):
                tap = tap1
                if lag == 2:
                    tap = tap2
                if lag == 3:
                    tap = tap3
                slot = W - 1 - lag + place
                tl.store(to + slot * C, own * tap, mask=at & (i < BT) & (place < lag))
        da1, da2, da3 = da, da, da
        if NEAR:
            da1 = tl.where(t - 1 >= start, da, 0.0)
            da2 = tl.where(t - 2 >= start, da, 0.0)
            da3 = tl.where(t - 3 >= start, da, 0.0)
        e1 = tl.fma(tap1, da1, e1)
        e2 = tl.fma(tap2, da2, e2)
        e3 = tl.fma(tap3, da3, e3)
        done = inside & (i >= 3) & (t - 3 < T)
        tl.store(d_ptr + (row - 3) * C + channel, e3.to(d_ptr.dtype.element_ty), mask=done)
        if PEAK:  # zero past the ends; in front are the unfinished rows of another block
            peak = tl.where(i >= 3, tl.maximum(peak, neighbours_peak(e3, EACH)), peak)
        e3 = e2
        e2 = e1
        e1 = tap0 * da
        p3 = p2
        p2 = p1
        p1 = x
    return dw_0, dw_1, dw_2, dw_3, peak


@triton.jit
def backward_kernel(
    x0, x1, x2, w0, w1, w2, s0, s1, s2, g0, g1, g2, d0, d1, d2, dw0, dw1, dw2, ds0, ds1, ds2,
    peak_ptr, start_ptr, document_ptr, T, blocks_T, b0, b1, b2, t0, t1, t2, c0, c1, c2, n0, n1,
    W: tl.constexpr, VARLEN: tl.constexpr, STATE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    UNROLL: tl.constexpr, NEAR_UNROLL: tl.constexpr,
):  # fmt: skip
    """Grid as `forward_kernel`. g = dy and d = dx contiguous; dw [B * blocks_T, C, 4], lag-major: dw[..., lag].

    ds [N, W-1, W-1, C] (written when STATE): ds[:, i, slot] is what token i of the document gives to that slot of the
    state; zeroed by the caller, since short documents have fewer tokens. peak fp32 [n, SLOTS] of each d, or None.
    """
    PEAK: tl.constexpr = peak_ptr is not None
    block = tl.program_id(1)
    which = (block >= n0).to(tl.int32) + (block >= n1).to(tl.int32)
    x_ptr, w_ptr, s_ptr = _pick(which, x0, x1, x2), _pick(which, w0, w1, w2), s0
    g_ptr, d_ptr, dw_ptr, ds_ptr = _pick(which, g0, g1, g2), _pick(which, d0, d1, d2), _pick(which, dw0, dw1, dw2), ds0
    if STATE:
        s_ptr, ds_ptr = _pick(which, s0, s1, s2), _pick(which, ds0, ds1, ds2)
    C, sb, st = _pick_size(which, c0, c1, c2), _pick_size(which, b0, b1, b2), _pick_size(which, t0, t1, t2)
    channel = (block - _pick_size(which, 0, n0, n1)) * BC + tl.arange(0, BC)
    inside = channel < C
    batch = (tl.program_id(0) // blocks_T).to(tl.int64)
    first = (tl.program_id(0) % blocks_T) * BT
    x_ptr += batch * sb
    g_ptr += batch * T * C
    d_ptr += batch * T * C
    tap0, tap1 = _tap(w_ptr, channel, inside, 0, W), _tap(w_ptr, channel, inside, 1, W)
    tap2, tap3 = _tap(w_ptr, channel, inside, 2, W), _tap(w_ptr, channel, inside, 3, W)
    p1 = tl.load(x_ptr + (first - 1).to(tl.int64) * st + channel, mask=inside & (first >= 1), other=0.0).to(tl.float32)
    p2 = tl.load(x_ptr + (first - 2).to(tl.int64) * st + channel, mask=inside & (first >= 2), other=0.0).to(tl.float32)
    p3 = tl.load(x_ptr + (first - 3).to(tl.int64) * st + channel, mask=inside & (first >= 3), other=0.0).to(tl.float32)
    if _near_a_start(start_ptr, first, T, VARLEN, BT + 3):
        dw_0, dw_1, dw_2, dw_3, peak = _backward_rows(
            x_ptr, g_ptr, d_ptr, s_ptr, ds_ptr, start_ptr, document_ptr, channel, inside, batch, first, T, C, st,
            tap0, tap1, tap2, tap3, p1, p2, p3, W, VARLEN, STATE, True, PEAK, BT, NEAR_UNROLL,
        )  # fmt: skip
    else:
        dw_0, dw_1, dw_2, dw_3, peak = _backward_rows(
            x_ptr, g_ptr, d_ptr, s_ptr, ds_ptr, start_ptr, document_ptr, channel, inside, batch, first, T, C, st,
            tap0, tap1, tap2, tap3, p1, p2, p3, W, VARLEN, STATE, False, PEAK, BT, UNROLL,
        )  # fmt: skip
    if PEAK:
        raise_peak(peak_ptr + which * SLOTS, peak, d_ptr.dtype.element_ty)
    to = dw_ptr + (tl.program_id(0).to(tl.int64) * C + channel) * 4
    tl.store(to, dw_0, mask=inside)
    tl.store(to + 1, dw_1, mask=inside)
    tl.store(to + 2, dw_2, mask=inside)
    tl.store(to + 3, dw_3, mask=inside)


def rows_of_a_block(T: int) -> int:
    """Rows that a program walks down: few for short streams, for the sake of decoding and of the interpreter."""
    return min(ROWS, triton.next_power_of_2(max(T, 1)))


def documents_of_tokens(cu_seqlens: Tensor, T: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First token and index of each token's document, int32 [T] both, without reading a value on the host."""
    bounds = cu_seqlens.to(device, torch.int32)
    token = torch.arange(T, dtype=torch.int32, device=device)
    document = torch.searchsorted(bounds, token, right=True, out_int32=True) - 1
    return bounds[document], document


class TritonShortConvolution(torch.autograd.Function):
    """n <= 3 tensors at once: apply(n, cu_seqlens, *x, *weights, *states) -> *y; states are all tensors or all None."""

    @staticmethod
    def forward(ctx: Any, n: int, cu_seqlens: Tensor | None, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        xs = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors[:n] if x is not None]
        weights = [w.contiguous() for w in tensors[n : 2 * n] if w is not None]
        states = [s.mT.contiguous() for s in tensors[2 * n :] if s is not None]
        B, T = xs[0].shape[:2]
        ys = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
        walk = None
        if cu_seqlens is not None:
            walk = documents_of_tokens(cu_seqlens, T, xs[0].device)
        ctx.save_for_backward(*xs, *weights, *states, *(walk or ()))
        ctx.counts = (n, len(states), walk is not None)
        if B * T:
            grid, sizes, meta = _launch(xs, weights, states, walk)
            token_start, document = walk or (xs[0], xs[0])
            forward_kernel[grid](
                *_three(xs),
                *_three(weights),
                *_three(states or xs),
                *_three(ys),
                token_start,
                document,
                T,
                *sizes,
                **meta,
            )
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        n, n_states, varlen = ctx.counts
        saved = ctx.saved_tensors
        xs, weights, states = saved[:n], saved[n : 2 * n], saved[2 * n : 2 * n + n_states]
        walk = saved[2 * n + n_states :] if varlen else None
        B, T = xs[0].shape[:2]
        W = weights[0].shape[1]
        gs = [dy.contiguous() for dy in dys]
        dxs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
        blocks = B * triton.cdiv(T, rows_of_a_block(T))
        dws = [torch.empty(blocks, x.shape[2], 4, dtype=torch.float32, device=x.device) for x in xs]
        dss = [torch.zeros(len(s), W - 1, *s.shape[1:], dtype=torch.float32, device=s.device) for s in states]
        peaks = PEAKS.slots(xs[0].device, n)
        if B * T:
            grid, sizes, meta = _launch(xs, weights, states, walk)
            token_start, document = walk or (xs[0], xs[0])
            backward_kernel[grid](
                *_three(xs), *_three(weights), *_three(states or xs), *_three(gs), *_three(dxs), *_three(dws),
                *_three(dss or dws), peaks, token_start, document, T, *sizes, **meta, NEAR_UNROLL=NEAR_UNROLL,
            )  # fmt: skip
        PEAKS.note_each(dxs, peaks)
        dweights = [dw.sum(0)[:, :W].flip(-1).to(w.dtype) for dw, w in zip(dws, weights)]
        if not states:
            return None, None, *dxs, *dweights, *[None] * n
        # [N, C, W-1, token] in memory: torch adds in an order that depends on the layout
        dstates = [ds.transpose(1, 3).contiguous().sum(-1).to(s.dtype) for ds, s in zip(dss, states)]
        return None, None, *dxs, *dweights, *dstates


def _three(tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Fills up to three arguments with the first one; the grid never reaches the copies."""
    return (*tensors, *[tensors[0]] * (3 - len(tensors)))


def _launch(xs: Any, weights: Any, states: Any, walk: Any) -> tuple[tuple[int, int], list[int], dict[str, Any]]:
    """Grid, size arguments and constants shared by the two kernels."""
    B, T = xs[0].shape[:2]
    BC = min(CHANNELS, triton.next_power_of_2(max(x.shape[2] for x in xs)))
    BT = rows_of_a_block(T)
    counts = [triton.cdiv(x.shape[2], BC) for x in xs] + [0] * (3 - len(xs))
    # Without a third (or second) tensor its first block lies past the grid.
    before = [sum(counts[: i + 1]) for i in range(2)]
    three = _three(xs)
    sizes = [triton.cdiv(T, BT), *(x.stride(0) for x in three), *(x.stride(1) for x in three)]
    sizes += [*(x.shape[2] for x in three), *before]
    grid = (B * triton.cdiv(T, BT), sum(counts))
    meta = {
        "W": weights[0].shape[1],
        "VARLEN": walk is not None,
        "STATE": bool(states) and weights[0].shape[1] > 1,
        "BT": BT,
        "BC": BC,
        "UNROLL": UNROLL,
        "num_warps": WARPS,
    }
    return grid, sizes, meta


def short_convolution_triton(
    xs: list[Tensor], weights: list[Tensor], *, cu_seqlens: Tensor | None, initial_states: Sequence[Tensor | None]
) -> list[Tensor]:
    """SiLU of the causal convolution of up to three tensors of one length and dtype; arguments already checked."""
    return list(TritonShortConvolution.apply(len(xs), cu_seqlens, *xs, *weights, *initial_states))
