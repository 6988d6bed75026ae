"""Round-to-nearest MXFP4 in one pass over memory: read a weight once, write nibbles and scale bytes once.

Same bytes as the torch path in `k3train.weights.mxfp4`, which is the readable statement of the rules.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUPS_PER_PROGRAM = 128


@triton.jit
def _codes(weight, byte, FROM_BF16: tl.constexpr):
    """E2M1 codes, int32 [G, 32], of float32 `weight` under scale bytes int32 [G].

    The grid is that of a float with one mantissa bit: its step is 1/2 up to 2, 1 up to 4, 2 from there. Adding
    1.5 * 2**23 steps leaves the number of steps, rounded half to even, in the low bits of the sum. This takes half the
    instructions of rounding in floating point, and at a fraction of a byte an instruction that is what bounds the time.
    """
    scaled = weight * ((254 - byte) << 23).to(tl.float32, bitcast=True)[:, None]
    size = tl.abs(scaled)
    exponent = tl.maximum(size.to(tl.int32, bitcast=True), 0x3F800000) & 0x7F800000  # of 1 below 1
    shift = exponent + 0x0B400000  # 22 exponents up, and half a mantissa: 1.5 * 2**23 steps
    steps = (size + shift.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - shift
    code = tl.minimum(steps + ((exponent >> 22) - 254), 7)
    # A product that underflows in the weight's own dtype is a zero without a sign: 2**-134 rounds to zero in bfloat16.
    negative = scaled < (-4.591774807899561e-41 if FROM_BF16 else 0.0)
    return code | tl.where(negative, 8, 0)


@triton.jit
def _squared_error(weight, byte, FROM_BF16: tl.constexpr):
    """float64 [G]: squared error of the groups under `byte`."""
    code = _codes(weight, byte, FROM_BF16)
    index = code & 7
    size = tl.where(index < 4, index * 0.5, tl.where(index < 6, index - 2.0, (index - 4) * 2.0))
    scale = tl.where(byte == 0, 1 << 22, byte << 23).to(tl.float32, bitcast=True)
    value = tl.where(code >= 8, -size, size).to(tl.float64) * scale.to(tl.float64)[:, None]
    delta = value - weight.to(tl.float64)
    return tl.sum(delta * delta, axis=1)


@triton.jit
def _quantise(
    weight_ptr, packed_ptr, scale_ptr, groups, SEARCH: tl.constexpr, FROM_BF16: tl.constexpr, G: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    inside = group < groups
    column = tl.arange(0, 32)
    weight = tl.load(weight_ptr + group[:, None] * 32 + column[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    # As integers, the bits of magnitudes are ordered, and NaN is the largest of them.
    bits = tl.max(weight.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    invalid = bits >= 0x7F600000  # 1.75 * 2**127 and beyond
    byte = tl.where(invalid, 127, tl.maximum(((bits + 0x200000) >> 23) - 2, 0))
    if SEARCH:
        low = tl.maximum(byte - 1, 0)
        raised = ((bits & 0x7FFFFF) >= 0x600000) & (byte > 0) & ~invalid
        better = _squared_error(weight, low, FROM_BF16) < _squared_error(weight, byte, FROM_BF16)
        byte = tl.where(raised & better, low, byte)
    even, odd = tl.split(tl.reshape(_codes(weight, byte, FROM_BF16), (G, 16, 2)))
    packed = (even | (odd << 4)).to(tl.uint8)
    tl.store(packed_ptr + group[:, None] * 16 + tl.arange(0, 16)[None, :], packed, mask=inside[:, None])
    tl.store(scale_ptr + group, tl.where(invalid, 255, byte).to(tl.uint8), mask=inside)


def quantise_rows(rows: Tensor, *, search: bool) -> tuple[Tensor, Tensor]:
    """Contiguous [R, in] bfloat16 or float32 -> packed uint8 [R, in/2], scale uint8 [R, in/32].

    A group with NaN, Inf or amax >= 1.75 * 2**127 gets scale byte 255; the caller raises. `search` is the rule ``mse``.
    """
    count, width = rows.shape
    packed = torch.empty(count, width // 2, dtype=torch.uint8, device=rows.device)
    scale = torch.empty(count, width // 32, dtype=torch.uint8, device=rows.device)
    if scale.numel():
        grid = (triton.cdiv(scale.numel(), GROUPS_PER_PROGRAM),)
        from_bf16 = rows.dtype == torch.bfloat16
        _quantise[grid](rows, packed, scale, scale.numel(), search, from_bf16, GROUPS_PER_PROGRAM, num_warps=4)
    return packed, scale
