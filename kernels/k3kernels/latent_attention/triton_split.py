"""Latent attention on a GPU: the cache is read once, by programs that share each sequence among them.

The time is that of reading the latents, which a tile uses twice: as keys, then as values. A tile computes
s = c q^T and o^T = c^T p with the latents on the long side of the tensor core, so that few heads waste little of it.
`lengths` is read on the device, so that a captured graph stays right while sequences grow: the grid covers the whole
cache, and programs beyond a sequence's end do nothing.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # its bfloat16 products are wrong


class Tile(NamedTuple):
    """Tokens and heads of a tile, warps, pipeline stages, and programs of the whole grid to aim at."""

    tokens: int
    heads: int
    warps: int
    stages: int
    programs: int


def default_tile(heads: int, dtype: torch.dtype) -> Tile:
    width = min(64, max(16, triton.next_power_of_2(heads)))
    if dtype == torch.float32:
        return Tile(16, min(width, 16), 4, 1, 264)
    return Tile(64, width, 4, 2, 132) if width <= 32 else Tile(32, 64, 8, 3, 132)


@triton.jit
def split_kernel(
    q_ptr, c_ptr, lengths_ptr, o_ptr, stats_ptr, c_sb, c_ss, H, splits, scale_log2,
    C: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr,
    EXACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (splits, ceil(H / BH), B). q [B, H, C + R]; o fp32 [B, splits, H, C] not yet divided by the sum of weights;
    stats fp32 [B, splits, H, 2]: the maximum (base 2) and the sum. EXACT: products in full fp32. WIDE: operands too."""
    split, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    channel, rest, token = tl.arange(0, BC), tl.arange(0, BR), tl.arange(0, BS)
    in_h, in_c, in_r = head < H, channel < C, rest < R
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    q_at = q_ptr + (batch * H + head)[None, :] * (C + R)
    q_c = tl.load(q_at + channel[:, None], mask=in_c[:, None] & in_h[None, :], other=0.0)  # [BC, BH]
    q_r = tl.load(q_at + C + rest[:, None], mask=in_r[:, None] & in_h[None, :], other=0.0)
    if WIDE:
        q_c, q_r = q_c.to(tl.float32), q_r.to(tl.float32)
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, splits), BS) * BS
    first = split * share
    end = tl.minimum(first + share, length)
    top = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BC, BH], tl.float32)
    c_at = c_ptr + batch * c_sb
    for start in range(first, end, BS):
        s = start + token
        in_s = s < end
        line = c_at + s.to(tl.int64)[:, None] * c_ss
        c = tl.load(line + channel[None, :], mask=in_s[:, None] & in_c[None, :], other=0.0)  # [BS, BC]
        r = tl.load(line + C + rest[None, :], mask=in_s[:, None] & in_r[None, :], other=0.0)
        if WIDE:
            c, r = c.to(tl.float32), r.to(tl.float32)
        score = tl.dot(c, q_c, input_precision=precision)
        score = tl.dot(r, q_r, score, input_precision=precision) * scale_log2  # [BS, BH]
        score = tl.where(in_s[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 0))
        shrink = tl.exp2(top - higher)
        p = tl.exp2(score - higher[None, :])
        total = total * shrink + tl.sum(p, 0)
        acc = tl.dot(tl.trans(c), p.to(c.dtype), acc * shrink[None, :], input_precision=precision)
        top = higher
    at = (batch * splits + split) * H + head
    tl.store(stats_ptr + at * 2, top, mask=in_h)
    tl.store(stats_ptr + at * 2 + 1, total, mask=in_h)
    o_at = o_ptr + at[None, :] * C + channel[:, None]
    tl.store(o_at, acc, mask=in_c[:, None] & in_h[None, :])


@triton.jit
def wide_split_kernel(
    q_ptr, c_ptr, lengths_ptr, o_ptr, stats_ptr, c_sb, c_ss, H, splits, scale_log2,
    C: tl.constexpr, R: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr,
    EXACT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`split_kernel` with the heads on the long side of the tensor core (BH of 64 and more): tiles of fewer tokens fit,
    so that more of them are on their way."""
    split, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    channel, rest, token = tl.arange(0, BC), tl.arange(0, BR), tl.arange(0, BS)
    in_h, in_c, in_r = head < H, channel < C, rest < R
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    q_at = q_ptr + (batch * H + head)[:, None] * (C + R)
    q_c = tl.load(q_at + channel[None, :], mask=in_h[:, None] & in_c[None, :], other=0.0)  # [BH, BC]
    q_r = tl.load(q_at + C + rest[None, :], mask=in_h[:, None] & in_r[None, :], other=0.0)
    if WIDE:
        q_c, q_r = q_c.to(tl.float32), q_r.to(tl.float32)
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, splits), BS) * BS
    first = split * share
    end = tl.minimum(first + share, length)
    top = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, BC], tl.float32)
    c_at = c_ptr + batch * c_sb
    for start in range(first, end, BS):
        s = start + token
        in_s = s < end
        line = c_at + s.to(tl.int64)[:, None] * c_ss
        c = tl.load(line + channel[None, :], mask=in_s[:, None] & in_c[None, :], other=0.0)  # [BS, BC]
        r = tl.load(line + C + rest[None, :], mask=in_s[:, None] & in_r[None, :], other=0.0)
        if WIDE:
            c, r = c.to(tl.float32), r.to(tl.float32)
        score = tl.dot(q_c, tl.trans(c), input_precision=precision)
        score = tl.dot(q_r, tl.trans(r), score, input_precision=precision) * scale_log2  # [BH, BS]
        score = tl.where(in_s[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - higher)
        p = tl.exp2(score - higher[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(c.dtype), c, acc * shrink[:, None], input_precision=precision)
        top = higher
    at = (batch * splits + split) * H + head
    tl.store(stats_ptr + at * 2, top, mask=in_h)
    tl.store(stats_ptr + at * 2 + 1, total, mask=in_h)
    o_at = o_ptr + at[:, None] * C + channel[None, :]
    tl.store(o_at, acc, mask=in_h[:, None] & in_c[None, :])


@triton.jit
def merge_kernel(
    o_ptr, stats_ptr, out_ptr, H, splits, C: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Grid (B * H, ceil(C / BC)): out [B, H, C]. Splits without a token have maximum -inf and weigh nothing."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // H, row % H
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    in_c = channel < C
    n = tl.arange(0, BN)
    first = batch * splits * H + head
    tops = tl.load(stats_ptr + (first + n * H) * 2, mask=n < splits, other=float("-inf"))
    sums = tl.load(stats_ptr + (first + n * H) * 2 + 1, mask=n < splits, other=0.0)
    top = tl.max(tops, 0)
    total = tl.sum(sums * tl.exp2(tops - top), 0)
    acc = tl.zeros([BC], tl.float32)
    for start in range(0, splits, STEP):
        m = start + tl.arange(0, STEP)
        weight = tl.exp2(tl.load(stats_ptr + (first + m * H) * 2, mask=m < splits, other=float("-inf")) - top)
        inside = (m < splits)[:, None] & in_c[None, :]
        part = tl.load(o_ptr + (first + m * H)[:, None] * C + channel[None, :], mask=inside, other=0.0)
        acc += tl.sum(part * weight[:, None], 0)
    tl.store(out_ptr + row * C + channel, (acc / total).to(out_ptr.dtype.element_ty), mask=in_c)


def splits_that_fill(rows: int, programs: int) -> int:
    """Programs to share each of `rows` among, so that the last of as few turns of `programs` as possible is full."""
    shares = {turns: max(1, turns * programs // rows) for turns in range(1, 9)}
    used = {turns: rows * n / (-(-rows * n // programs) * programs) for turns, n in shares.items()}
    return next((shares[turns] for turns in used if used[turns] >= 0.95), shares[max(used, key=lambda t: used[t])])


def latent_attention_triton(
    q: Tensor, latents: Tensor, lengths: Tensor, values: int, scale: float, tile: Tile | None = None
) -> Tensor:
    """`k3kernels.latent_attention.latent_attention` on Triton; arguments already checked."""
    (B, H, D), S = q.shape, latents.shape[1]
    out = torch.empty(B, H, values, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    if latents.stride(2) != 1:
        raise ValueError(f"latents: Triton needs unit stride over channels, got {latents.stride()}")
    tile = tile or default_tile(H, q.dtype)
    q = q.contiguous()
    blocks = triton.cdiv(H, tile.heads)
    splits = max(1, min(triton.cdiv(S, tile.tokens), splits_that_fill(B * blocks, tile.programs), 1024))
    part = torch.empty(B, splits, H, values, dtype=torch.float32, device=q.device)
    stats = torch.empty(B, splits, H, 2, dtype=torch.float32, device=q.device)
    kernel = wide_split_kernel if tile.heads >= 64 else split_kernel
    kernel[(splits, blocks, B)](
        q, latents, lengths, part, stats, *latents.stride()[:2], H, splits, scale * 1.4426950408889634,
        C=values, R=D - values, BC=max(16, triton.next_power_of_2(values)),
        BR=max(16, triton.next_power_of_2(max(1, D - values))), BH=tile.heads, BS=tile.tokens,
        EXACT=q.dtype == torch.float32, WIDE=INTERPRETED, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    channels = min(64, triton.next_power_of_2(values))
    merge_kernel[(B * H, triton.cdiv(values, channels))](
        part, stats, out, H, splits, C=values, BC=channels, BN=triton.next_power_of_2(splits), STEP=32, num_warps=4
    )
    return out
