"""Packed MXFP4 experts in plain torch: decode, then multiply, one expert at a time.

A byte holds the even column in its low nibble and the odd one in its high nibble. A nibble is sign << 3 | index into
{0, .5, 1, 1.5, 2, 3, 4, 6} (E2M1); a scale byte b of a group of 32 columns means 2**(b - 127) (E8M0).
"""

import torch
from torch import Tensor

GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """packed uint8 [..., out, in/2], scale uint8 [..., out, in/32] -> [..., out, in].

    Exact in float32 and bfloat16 wherever the value has one there: the largest codes overflow under the scale bytes 253
    and 254. Byte 255, which is NaN, gives NaN.
    """
    table = torch.tensor(VALUES, dtype=torch.float32, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    byte = scale.int()
    bits = torch.where(byte == 0, 1 << 22, byte << 23)  # 2**-127, byte 0, is subnormal
    power = torch.where(byte == 255, torch.nan, bits.view(torch.float32))
    groups = table[codes.int()].unflatten(-1, (-1, GROUP))
    return (groups * power.unsqueeze(-1)).flatten(-2).to(dtype)


def grouped_linear_torch(x: Tensor, packed: Tensor, scale: Tensor, counts: Tensor) -> Tensor:
    """x [N, in] sorted by expert, counts [E] -> [N, out]; reads `counts` on the host."""
    y = x.new_empty(x.shape[0], packed.shape[1])
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            weight = decode(packed[expert], scale[expert], x.dtype)
            y[start : start + count] = x[start : start + count] @ weight.T
        start += count
    return y
