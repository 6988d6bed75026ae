"""The grouped linear over packed experts on a GPU: bytes come from memory, weights exist in registers alone.

At a few rows an expert the time is that of reading the weights, so

* a tile computes y^T = W x^T: the weight, the large operand, takes the side of the tensor core that may come from
  registers, and a block of rows is as narrow as 16;
* even columns (low nibbles) and odd columns (high nibbles) are two products, with x split the same way beforehand:
  no nibble ever changes its place;
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

# Four bytes -> four low and four high nibbles as bfloat16, times four scales. Two bytes are spread over the upper
# halves of a register; sign and three magnitude bits go to bits 15 and 8-6, where E2M1 is a bfloat16 short of a factor
# 2**126; 0.5 is a subnormal there, which mul.bf16x2 keeps. Both multiplications are exact.
_DECODE = """
{
.reg .b32 t, u, v, c;
mov.b32 c, 0x7E807E80;
prmt.b32 t, $4, 0, 0x1404;
shl.b32 u, t, 4;  shr.b32 v, t, 2;
and.b32 u, u, 0x80008000;  and.b32 v, v, 0x01C001C0;  or.b32 u, u, v;
mul.rn.bf16x2 u, u, c;  mul.rn.bf16x2 $0, u, $5;
shr.b32 v, t, 6;
and.b32 u, t, 0x80008000;  and.b32 v, v, 0x01C001C0;  or.b32 u, u, v;
mul.rn.bf16x2 u, u, c;  mul.rn.bf16x2 $2, u, $5;
prmt.b32 t, $4, 0, 0x3424;
shl.b32 u, t, 4;  shr.b32 v, t, 2;
and.b32 u, u, 0x80008000;  and.b32 v, v, 0x01C001C0;  or.b32 u, u, v;
mul.rn.bf16x2 u, u, c;  mul.rn.bf16x2 $1, u, $6;
shr.b32 v, t, 6;
and.b32 u, t, 0x80008000;  and.b32 v, v, 0x01C001C0;  or.b32 u, u, v;
mul.rn.bf16x2 u, u, c;  mul.rn.bf16x2 $3, u, $6;
}
"""
DECODE = tl.constexpr(_DECODE)


class Tile(NamedTuple):
    """Rows of x, outputs and packed bytes of a tile; warps and pipeline stages."""

    rows: int
    outputs: int
    bytes: int
    warps: int
    stages: int


def default_tile(rows_per_expert: float) -> Tile:
    """By the mean number of rows an expert: narrow and deeply pipelined where the weights' bytes are the time."""
    if rows_per_expert <= 16:
        return Tile(16, 64, 64, 4, 4)
    if rows_per_expert <= 32:
        return Tile(32, 64, 64, 4, 4)
    if rows_per_expert <= 64:
        return Tile(64, 64, 64, 4, 3)
    return Tile(128, 128, 32, 8, 3)


@triton.jit
def _magnitude(code):
    """Float32 value of E2M1 codes (int32): the same placement of bits as in PTX, in float32's wider exponent."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)  # sign to 31; e2m1 behind 6 zero exponent bits
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def grouped_linear_kernel(
    x_ptr, packed_ptr, scale_ptr, counts_ptr, y_ptr, experts, outputs,
    HALF: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, PTX: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(outputs / BN), E, SPLITS). x [N, 2, HALF]: even columns, then odd ones; y [N, outputs]."""
    expert = tl.program_id(1)
    index = tl.arange(0, BE)
    counts = tl.load(counts_ptr + index, mask=index < experts, other=0).to(tl.int32)
    first = tl.sum(tl.where(index < expert, counts, 0), 0)
    end = first + tl.sum(tl.where(index == expert, counts, 0), 0)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    in_n = n < outputs
    line = tl.cast(expert, tl.int64) * outputs + tl.where(in_n, n, 0)  # beyond the last output: any valid one
    k = tl.arange(0, BK)
    group = tl.arange(0, BK // 16)
    for start in range(first + tl.program_id(2) * BM, end, SPLITS * BM):
        m = start + tl.arange(0, BM)
        in_m = m < end
        x_at = x_ptr + m.to(tl.int64)[:, None] * (2 * HALF) + k[None, :]
        acc = tl.zeros([BN, BM], tl.float32)
        for at in range(0, HALF, BK):
            packed_at = packed_ptr + line[:, None] * HALF + (at + k)[None, :]
            scale_at = scale_ptr + line[:, None] * (HALF // 16) + (at // 16 + group)[None, :]
            if FULL:
                byte = tl.load(packed_at)
                exponent = tl.load(scale_at)
                even = tl.load(x_at + at, mask=in_m[:, None], other=0.0)
                odd = tl.load(x_at + HALF + at, mask=in_m[:, None], other=0.0)
            else:
                in_k = at + k < HALF
                byte = tl.load(packed_at, mask=in_k[None, :], other=0)
                exponent = tl.load(scale_at, mask=(at // 16 + group < HALF // 16)[None, :], other=0)
                even = tl.load(x_at + at, mask=in_m[:, None] & in_k[None, :], other=0.0)
                odd = tl.load(x_at + HALF + at, mask=in_m[:, None] & in_k[None, :], other=0.0)
            if PTX:
                bits = tl.maximum(exponent.to(tl.int32) << 7, 0x40).to(tl.int16)  # byte 0: the subnormal 2**-127
                power = bits.to(tl.bfloat16, bitcast=True)
                powers = tl.reshape(tl.broadcast_to(power[:, :, None], (BN, BK // 16, 16)), (BN, BK))
                low, high = tl.inline_asm_elementwise(
                    DECODE,
                    "=&r,=&r,=&r,=&r,r,r,r",
                    [byte, powers],
                    dtype=(tl.bfloat16, tl.bfloat16),
                    is_pure=True,
                    pack=4,
                )
                acc = tl.dot(low, tl.trans(even), acc)
                acc = tl.dot(high, tl.trans(odd), acc)
            else:
                wide = exponent.to(tl.int32)
                power = tl.where(wide == 0, 1 << 22, wide << 23).to(tl.float32, bitcast=True)
                powers = tl.reshape(tl.broadcast_to(power[:, :, None], (BN, BK // 16, 16)), (BN, BK))
                code = byte.to(tl.int32)
                low = _magnitude(code & 15) * powers
                high = _magnitude(code >> 4) * powers
                acc = tl.dot(low, tl.trans(even.to(tl.float32)), acc, input_precision="ieee")
                acc = tl.dot(high, tl.trans(odd.to(tl.float32)), acc, input_precision="ieee")
        y_at = y_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
        tl.store(y_at, tl.trans(acc).to(y_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def grouped_linear_triton(x: Tensor, packed: Tensor, scale: Tensor, counts: Tensor, tile: Tile | None = None) -> Tensor:
    """`k3kernels.mxfp4.mxfp4_grouped_linear` on Triton; arguments already checked, all on one device."""
    rows, width = x.shape
    experts, outputs, half = packed.shape
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    packed, scale, counts = packed.contiguous(), scale.contiguous(), counts.contiguous()
    mean = rows / experts
    tile = tile or default_tile(mean)
    if x.dtype == torch.float32 and tile.outputs * tile.bytes > 2048:
        tile = tile._replace(outputs=64, bytes=32, stages=2)  # float32 operands take twice the space
    splits = max(1, triton.cdiv(int(mean), tile.rows))
    split_x = x.reshape(rows, half, 2).transpose(1, 2).contiguous()
    grouped_linear_kernel[(triton.cdiv(outputs, tile.outputs), experts, splits)](
        split_x, packed, scale, counts, y, experts, outputs,
        HALF=half, BE=triton.next_power_of_2(experts), BM=tile.rows, BN=tile.outputs, BK=tile.bytes, SPLITS=splits,
        PTX=x.dtype == torch.bfloat16 and not INTERPRETED, FULL=half % tile.bytes == 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y
