"""The grouped linear over packed experts on a GPU: bytes come from memory, weights exist in registers alone.

At a few rows an expert the time is that of reading the weights, so

* a tile computes y^T = W x^T: the weight, the large operand, takes the side of the tensor core that may come from
  registers, and a block of rows is as narrow as 16;
* the sum over columns may run in any order, so x is permuted beforehand such that the 16 contiguous bytes of a group
  are what one thread feeds to the tensor core: no code ever moves between threads, and a thread needs one scale a group
  (`permuted` has the order);
* likewise the rows of a tile are loaded in the order in which the tensor core's registers hold them;
* decoding takes about three instructions a weight, two weights at a time (inline PTX for bfloat16).

Every expert has its own programs, which read their rows' place from the counts on the device: the host waits for
nothing, and an expert of any number of rows is right.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


MOVES = ((12, 6), (8, 2), (4, -2), (0, -6))
"""How far the sign and the magnitude of the four codes of a 16-bit lane go to the left."""


def _ptx(steps: str) -> str:
    """Two words of eight codes -> eight registers, each the same code of both words as bfloat16, times a scale.

    The halves of both words are paired first, so that a register's two lanes hold four codes of one word each. Sign and
    magnitude of a code go to bits 15 and 8-6, where E2M1 is a bfloat16 short of a factor 2**126; 0.5 is a subnormal
    there, which mul.bf16x2 keeps. Every multiplication is exact. `steps`: that factor and the scale.
    """
    lines = [".reg .b32 p, q, u, v, c;", "mov.b32 c, 0x7E807E80;", "prmt.b32 p, $8, $9, 0x5410;",
             "prmt.b32 q, $8, $9, 0x7632;"]  # fmt: skip
    for code in range(8):
        for register, by in zip("uv", MOVES[code % 4]):
            lines.append(f"sh{'l' if by >= 0 else 'r'}.b32 {register}, {'p' if code < 4 else 'q'}, {abs(by)};")
        lines.append("and.b32 u, u, 0x80008000; and.b32 v, v, 0x01C001C0; or.b32 u, u, v;")
        lines.append(steps.format(out=code))
    return "{\n" + "\n".join(lines) + "\n}"


DECODE = tl.constexpr(_ptx("mul.rn.bf16x2 u, u, c; mul.rn.bf16x2 ${out}, u, $10;"))
DECODE_SMALL = tl.constexpr(_ptx("mul.rn.bf16x2 ${out}, u, $10;"))  # the scale is given times 2**126
SMALL_SCALE = 128  # the largest byte whose scale times 2**126 is a bfloat16
OPERANDS = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r")
BLOCK = 128  # columns that four threads hold of a row: 16 words, 4 groups


class Tile(NamedTuple):
    """Rows of x and outputs of a tile; blocks of columns a turn; warps (4 or 8: 16 outputs each, or more) and stages."""

    rows: int
    outputs: int
    blocks: int
    warps: int
    stages: int


def default_tile(rows_per_expert: float) -> Tile:
    """By the mean number of rows an expert: narrow and deeply pipelined where the weights' bytes are the time."""
    if rows_per_expert <= 16:
        return Tile(16, 64, 2, 4, 3)
    if rows_per_expert <= 32:
        return Tile(32, 128, 1, 4, 3)
    return Tile(64, 128, 1, 4, 3)


@triton.jit
def permute_kernel(x_ptr, y_ptr, width, x_sn, PADDED: tl.constexpr, SPAN: tl.constexpr):
    """Grid (N, ceil(PADDED / SPAN)): x [N, width] -> y [N, PADDED], read in order, written in that of `permuted`."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = place % 128
    column = place - inside + (inside // 2) % 4 * 32 + inside // 64 * 16 + inside % 2 * 8 + (inside // 8) % 8
    x = tl.load(x_ptr + row * x_sn + column, mask=column < width, other=0.0)
    tl.store(y_ptr + row * PADDED + place, x, mask=place < PADDED)


def permuted(x: Tensor) -> Tensor:
    """[N, in] -> [N, blocks, 128], zero beyond in. Column 32 t + 8 j + c of a block goes to 64 (j // 2) + 8 c + 2 t +
    j % 2: thread t holds group t, and lanes are neighbouring words."""
    rows, width = x.shape
    blocks = triton.cdiv(width, BLOCK)
    y = torch.empty(rows, blocks, BLOCK, dtype=x.dtype, device=x.device)
    span = min(1024, triton.next_power_of_2(blocks * BLOCK))
    grid = (rows, triton.cdiv(blocks * BLOCK, span))
    permute_kernel[grid](x, y, width, x.stride(0), PADDED=blocks * BLOCK, SPAN=span, num_warps=4)
    return y


@triton.jit
def _value(word, power, CODE: tl.constexpr):
    """Float32 value of a code of each word, times its scale: the same placement of bits as in PTX, in float32's
    exponent."""
    code = word >> (4 * CODE)
    bits = ((code & 8) << 28) | ((code & 7) << 22)  # sign to 31; e2m1 behind 6 zero exponent bits
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * power  # 2**126


@triton.jit
def _columns(c0, c1, c2, c3, c4, c5, c6, c7, BN: tl.constexpr, WARPS: tl.constexpr):
    """Eight tensors [BN, 4 t, 4 j], one a code -> [BN, 128] in the order of `permuted`, rows in their own order."""
    even = tl.join(tl.join(c0, c4), tl.join(c2, c6))  # [BN, t, j, bit 2, bit 1]
    odd = tl.join(tl.join(c1, c5), tl.join(c3, c7))
    all_ = tl.join(even, odd)  # ... bit 0
    split = tl.reshape(all_, (BN // (16 * WARPS), 2, WARPS, 8, 4, 2, 2, 2, 2, 2))  # rows: turn, register, warp, lane
    return tl.reshape(tl.permute(split, (0, 2, 1, 3, 5, 7, 8, 9, 4, 6)), (BN, 128))


@triton.jit
def grouped_linear_kernel(
    x_ptr, words_ptr, scale_ptr, counts_ptr, y_ptr, experts, outputs,
    WORDS: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, UNROLL: tl.constexpr,
    WARPS: tl.constexpr, SPLITS: tl.constexpr, PTX: tl.constexpr, FULL: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(outputs / BN), E, SPLITS). x [N, ceil(WORDS / 16), 128], permuted; words int32 [E, outputs, WORDS];
    scale uint8 [E, outputs, WORDS / 4]; y [N, outputs]."""
    BLOCKS: tl.constexpr = (WORDS + 15) // 16
    expert = tl.program_id(1)
    index = tl.arange(0, BE)
    counts = tl.load(counts_ptr + index, mask=index < experts, other=0).to(tl.int32)
    first = tl.sum(tl.where(index < expert, counts, 0), 0)
    end = first + tl.sum(tl.where(index == expert, counts, 0), 0)
    # the row at place i of the loaded tile, where places count (register, warp, lane): the tensor core's registers hold
    # rows in the order (warp, register, lane)
    i = tl.arange(0, BN)
    row = (i // (16 * WARPS)) * (16 * WARPS) + ((i // 8) % WARPS) * 16 + ((i // (8 * WARPS)) % 2) * 8 + i % 8
    n_loaded = tl.program_id(0) * BN + row
    line = tl.cast(expert, tl.int64) * outputs + tl.where(n_loaded < outputs, n_loaded, 0)  # beyond: any valid one
    n = tl.program_id(0) * BN + i
    in_n = n < outputs
    word = tl.arange(0, 16)
    group = tl.arange(0, 4)
    k = tl.arange(0, 128)
    for start in range(first + tl.program_id(2) * BM, end, SPLITS * BM):
        m = start + tl.arange(0, BM)
        in_m = m < end
        x_at = x_ptr + m.to(tl.int64)[:, None] * (BLOCKS * 128) + k[None, :]
        acc = tl.zeros([BN, BM], tl.float32)
        for turn in range(0, BLOCKS, UNROLL):
            for part in tl.static_range(UNROLL):
                block = turn + part
                words_at = words_ptr + line[:, None] * WORDS + (block * 16 + word)[None, :]
                if FULL:
                    words = tl.load(words_at)
                    four = tl.load((scale_ptr + line * (WORDS // 4) + block * 4).to(tl.pointer_type(tl.int32)))
                    exponent = (four[:, None] >> (8 * group)[None, :]) & 255
                    rows = tl.load(x_at + block * 128, mask=in_m[:, None], other=0.0)
                else:
                    words = tl.load(words_at, mask=(block * 16 + word < WORDS)[None, :], other=0)
                    scale_at = scale_ptr + line[:, None] * (WORDS // 4) + (block * 4 + group)[None, :]
                    exponent = tl.load(scale_at, mask=(block * 4 + group < WORDS // 4)[None, :], other=0).to(tl.int32)
                    rows = tl.load(x_at + block * 128, mask=in_m[:, None] & (block < BLOCKS), other=0.0)
                words = tl.reshape(words, (BN, 4, 4))
                if PTX:
                    if SMALL:  # byte 0 stays 2**-127 there, times 2**126
                        power = (exponent + 126) * 0x800080
                    else:
                        power = tl.maximum(exponent << 7, 0x40) * 0x10001  # byte 0: the subnormal 2**-127
                    power = tl.broadcast_to(power[:, :, None], (BN, 4, 4))
                    c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
                        DECODE_SMALL if SMALL else DECODE, OPERANDS, [words, power],
                        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                               tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                        is_pure=True, pack=2,
                    )  # fmt: skip
                    acc = tl.dot(_columns(c0, c1, c2, c3, c4, c5, c6, c7, BN, WARPS), tl.trans(rows), acc)
                else:
                    power = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
                    power = tl.broadcast_to(power[:, :, None], (BN, 4, 4))
                    weight = _columns(
                        _value(words, power, 0), _value(words, power, 1), _value(words, power, 2),
                        _value(words, power, 3), _value(words, power, 4), _value(words, power, 5),
                        _value(words, power, 6), _value(words, power, 7), BN, WARPS,
                    )  # fmt: skip
                    acc = tl.dot(weight, tl.trans(rows.to(tl.float32)), acc, input_precision="ieee")
        y_at = y_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
        tl.store(y_at, tl.trans(acc).to(y_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def grouped_linear_triton(
    x: Tensor, packed: Tensor, scale: Tensor, counts: Tensor, tile: Tile | None = None, largest_scale: int = 254
) -> Tensor:
    """`k3kernels.mxfp4.mxfp4_grouped_linear` on Triton; arguments already checked, all on one device."""
    rows = x.shape[0]
    experts, outputs, half = packed.shape
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    words, scale, counts = packed.contiguous().view(torch.int32), scale.contiguous(), counts.contiguous()
    mean = rows / experts
    tile = tile or default_tile(mean)
    if x.dtype == torch.float32:
        tile = Tile(min(tile.rows, 16), 64, 1, 4, 1)  # operands take twice the space, and registers
    splits = max(1, triton.cdiv(int(mean), tile.rows))
    full = half % 64 == 0 and half // 64 % tile.blocks == 0
    grouped_linear_kernel[(triton.cdiv(outputs, tile.outputs), experts, splits)](
        permuted(x if x.stride(1) == 1 else x.contiguous()), words, scale, counts, y, experts, outputs,
        WORDS=half // 4, BE=triton.next_power_of_2(experts), BM=tile.rows, BN=tile.outputs, UNROLL=tile.blocks,
        WARPS=tile.warps, SPLITS=splits, PTX=x.dtype == torch.bfloat16 and not INTERPRETED, FULL=full,
        SMALL=largest_scale <= SMALL_SCALE,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y
