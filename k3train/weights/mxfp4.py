"""MXFP4: E2M1 elements that share one E8M0 scale per group of 32 along the input dimension.

An element code is ``sign << 3 | index`` into {0, .5, 1, 1.5, 2, 3, 4, 6}; a scale byte ``b`` means ``2**(b - 127)``;
a packed byte holds the even column in its low nibble and the odd column in its high nibble. This is the layout of the
released Kimi K3 experts and of compressed-tensors' ``mxfp4-pack-quantized`` (``weight_packed``, ``weight_scale``).

With ``a = amax(group) = m * 2**f`` and ``m`` in [1, 2), the scale rules are

    even   e = f - 2 + [m >= 1.75]     byte for byte what compressed-tensors and torchao (EVEN) write; the default
    mse    e in {f - 2, f - 1}, whichever has the smaller squared error of the group

Elements are rounded to nearest, ties to the even code, and saturate at +-6.

A weight is quantised from the dtype in which it is stored: 6.99 rounds to 7 in bfloat16 and takes the next scale there.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from k3train.errors import LayoutError, WeightsError

GROUP = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ScaleRule = Literal["even", "mse"]

# The range of scale bytes that every known consumer accepts; vLLM's FP8-activation path refuses bytes above 249, and
# decoders that build the scale by shifting the byte into the exponent read byte 0 as zero instead of 2**-127.
SAFE_SCALE_BYTES = (1, 249)
INVALID_SCALE = 255  # E8M0's NaN; used internally to mark a group that cannot be quantised

_CARRY_AT_1_75 = 1 << 21  # added to float32 bits, it carries into the exponent exactly when the mantissa is >= 1.75
_LARGEST_BITS = 0x7F600000  # float32 bits of 1.75 * 2**127: from here on the EVEN rule leaves float32's exponent range
_CPU_CHUNK = 1 << 20  # elements per pass: the temporaries stay in cache, and memory stays bounded
_GPU_CHUNK = 1 << 26


class MXFP4ScaleWarning(UserWarning):
    """A scale byte is correct but lies outside the range that every consumer accepts."""


@dataclass(frozen=True)
class Packed:
    """One quantised matrix or a stack of them: ``packed`` uint8 [..., out, in/2], ``scale`` uint8 [..., out, in/32]."""

    packed: Tensor
    scale: Tensor

    def dequantise(self, dtype: torch.dtype = torch.bfloat16, name: str = "weight") -> Tensor:
        """The values, [..., out, in]; exact in bfloat16 and float32."""
        return dequantise(self.packed, self.scale, dtype=dtype, name=name)


def quantise(weight: Tensor, *, scales: ScaleRule = "even", name: str = "weight", backend: str = "auto") -> Packed:
    """Quantise ``weight`` [..., out, in] (bfloat16, float16 or float32) to MXFP4, round to nearest.

    ``scales`` is the scale rule, ``name`` appears in errors and warnings. ``backend``: ``torch`` runs anywhere,
    ``triton`` is one fused pass on CUDA, ``auto`` takes triton for CUDA tensors; all of them give the same bytes.
    Raises WeightsError for NaN, Inf and amax >= 1.75 * 2**127 (the row is named), and for an input dimension that 32
    does not divide.
    Warns (MXFP4ScaleWarning) where a scale byte lies outside [1, 249].
    """
    if scales not in get_args(ScaleRule):
        raise WeightsError(f"scales={scales!r} is unknown; choose one of {', '.join(get_args(ScaleRule))}")
    rows, shape = _as_rows(weight, name)
    if backend == "triton" or (backend == "auto" and weight.is_cuda):
        from k3train.weights import mxfp4_triton

        packed, scale = mxfp4_triton.quantise_rows(rows.contiguous(), search=scales == "mse")
    elif backend in ("auto", "torch"):
        packed, scale = _quantise_rows(rows, scales)
    else:
        raise WeightsError(f"backend={backend!r} is unknown; choose auto, torch or triton")
    # One pass over the scales and one wait for the device, unless something is wrong.
    low, high = torch.stack(torch.aminmax(scale)).tolist() if scale.numel() else SAFE_SCALE_BYTES
    if high == INVALID_SCALE:
        _refuse_invalid(rows, scale, shape, name)
    if low < SAFE_SCALE_BYTES[0] or high > SAFE_SCALE_BYTES[1]:
        _warn_unusual(scale, name)
    return Packed(packed.view(*shape[:-1], shape[-1] // 2), scale.view(*shape[:-1], shape[-1] // GROUP))


def dequantise(packed: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.bfloat16, name: str = "weight") -> Tensor:
    """Decode ``packed`` uint8 [..., out, in/2] with ``scale`` uint8 [..., out, in/32] to [..., out, in].

    Raises WeightsError when shapes or dtypes disagree, or a scale is byte 255 (NaN: consumers read it in three ways).
    Bytes 253 and 254 overflow bfloat16 for the codes 4 and 6 and decode to infinity there, as in compressed-tensors.
    """
    check_packed(packed, scale, name)
    bad = (scale == INVALID_SCALE).nonzero()
    if len(bad):
        at = bad[0].tolist()
        raise WeightsError(
            f"{name}: scale byte 255 (NaN) at {_row_text(at[:-1])}, group {at[-1]}; {len(bad)} such groups. "
            "The file is damaged, or its writer met NaN: export it again"
        )
    groups = scale.shape[-1]
    value = torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype, device=packed.device)
    out, codes_in, scale_in = value.view(-1, groups, GROUP), packed.view(-1, groups, GROUP // 2), scale.view(-1, groups)
    step = max(1, (_GPU_CHUNK if packed.is_cuda else _CPU_CHUNK) // (groups * GROUP))
    for i in range(0, out.shape[0], step):
        codes = unpack(codes_in[i : i + step])
        table = _table(packed.device, torch.float32)
        out[i : i + step] = table[codes.int()] * exponent_value(scale_in[i : i + step]).unsqueeze(-1)
    return value


def check_packed(packed: Tensor, scale: Tensor, name: str) -> None:
    """Raise WeightsError unless the pair is uint8 [..., out, in/2] and [..., out, in/32] of the same matrix."""
    scale_types = (torch.uint8, torch.float8_e8m0fnu)
    if packed.dtype != torch.uint8 or scale.dtype not in scale_types:
        raise WeightsError(
            f"{name}: weight_packed must be uint8 and weight_scale uint8 (E8M0 bytes), "
            f"got {packed.dtype} and {scale.dtype}"
        )
    want = (*packed.shape[:-1], packed.shape[-1] * 2 // GROUP) if packed.ndim else ()
    if packed.ndim < 2 or packed.shape[-1] * 2 % GROUP or tuple(scale.shape) != want:
        raise WeightsError(
            f"{name}: weight_packed {list(packed.shape)} needs a weight_scale of shape {list(want)} "
            f"([out, in/32] for a packed [out, in/2]), got {list(scale.shape)}"
        )


def round_codes(values: Tensor) -> Tensor:
    """Round scaled values (weight / scale, any shape) to E2M1 codes, uint8: nearest, ties to the even code, saturating.

    -0.0 becomes code 0; a negative value that rounds to zero keeps its sign (code 8), as in compressed-tensors.
    """
    size = values.abs().float()
    # Three steps of a binary float grid: 1/2 below 2, 1 below 4, 2 from there. torch.round is half to even, and an even
    # multiple of the step is an even code on each of the three.
    code = torch.where(size < 2, (size * 2).round(), torch.where(size < 4, size.round() + 2, (size / 2).round() + 4))
    return code.clamp_(max=7).to(torch.uint8) | ((values < 0).to(torch.uint8) << 3)


def code_values(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E2M1 codes (uint8, 0..15) to their values, before the scale."""
    return _table(codes.device, dtype)[codes.int()]


def pack(codes: Tensor) -> Tensor:
    """Codes uint8 [..., in] to bytes uint8 [..., in/2]; the even column goes to the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Bytes uint8 [..., n] to codes uint8 [..., 2n]; the inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def exponent_value(scale: Tensor) -> Tensor:
    """Scale bytes to float32 2**(b - 127), exact for every byte but 255 (which gives infinity here)."""
    byte = scale.view(torch.uint8).int()
    # A byte shifted into float32's exponent field is the power itself; byte 0 would read as zero and is a subnormal.
    return torch.where(byte == 0, 1 << 22, byte << 23).view(torch.float32)


def inverse_scale(scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Scale bytes (0..252) to 2**(127 - b), exact, so that a multiplication by it equals the division by the scale."""
    return ((254 - scale.int()) << 23).view(torch.float32).to(dtype)


def even_scale(amax: Tensor) -> Tensor:
    """Group maxima (>= 0) to scale bytes by the rule EVEN; `INVALID_SCALE` where the group cannot be quantised."""
    bits = amax.float().view(torch.int32)
    byte = ((bits + _CARRY_AT_1_75) >> 23).sub_(2).clamp_(min=0)
    return torch.where(bits >= _LARGEST_BITS, INVALID_SCALE, byte).to(torch.uint8)


def scale_bytes(weight: Tensor, *, scales: ScaleRule = "even", name: str = "weight") -> Tensor:
    """The scale bytes of ``weight`` [..., out, in] alone: uint8 [..., out, in/32]. Errors as in `quantise`."""
    rows, shape = _as_rows(weight, name)
    _, scale = _quantise_rows(rows, scales)
    _refuse_invalid(rows, scale, shape, name)
    return scale.view(*shape[:-1], shape[-1] // GROUP)


def check_tensor_parallel(in_features: int, ranks: int, name: str = "w2") -> None:
    """Raise LayoutError unless ``in_features`` split over ``ranks`` leaves whole groups of 32 on every rank.

    Whole matrices are quantised before any split, so a legal shard of the bytes is the quantised shard of the weight.
    """
    if in_features % ranks or (in_features // ranks) % GROUP:
        legal = [n for n in range(1, in_features // GROUP + 1) if (in_features // GROUP) % n == 0]
        raise LayoutError(
            f"{name}: {in_features} input features over tensor-parallel size {ranks} cut a group of {GROUP}; "
            f"legal sizes are {', '.join(map(str, legal))}"
        )


def _as_rows(weight: Tensor, name: str) -> tuple[Tensor, tuple[int, ...]]:
    """``weight`` as a matrix [rows, in] and its own shape, or WeightsError."""
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise WeightsError(f"{name}: cannot quantise {weight.dtype}; convert it to bfloat16 or float32 first")
    if weight.ndim < 2 or weight.shape[-1] == 0 or weight.shape[-1] % GROUP:
        raise WeightsError(
            f"{name}: shape {list(weight.shape)} cannot be quantised; "
            f"a matrix [out, in] with in a multiple of {GROUP} is needed"
        )
    # float16 cannot hold the scales; its values are exact in float32.
    rows = weight.detach().reshape(-1, weight.shape[-1])
    return (rows.float() if rows.dtype == torch.float16 else rows), tuple(weight.shape)


def _quantise_rows(rows: Tensor, scales: ScaleRule) -> tuple[Tensor, Tensor]:
    """[R, in] -> packed [R, in/2], scale [R, in/32]; invalid groups are marked, not raised."""
    count, width = rows.shape
    packed = torch.empty(count, width // 2, dtype=torch.uint8, device=rows.device)
    scale = torch.empty(count, width // GROUP, dtype=torch.uint8, device=rows.device)
    step = max(1, (_GPU_CHUNK if rows.is_cuda else _CPU_CHUNK) // width)
    for i in range(0, count, step):
        groups = rows[i : i + step].unflatten(-1, (-1, GROUP))
        byte = even_scale(groups.abs().amax(-1))
        if scales == "mse":
            _search_scale(groups, byte)
        packed[i : i + step] = pack(_codes(groups, byte)).flatten(-2)
        scale[i : i + step] = byte
    return packed, scale


def _codes(groups: Tensor, byte: Tensor) -> Tensor:
    # In the weight's own dtype: a product that underflows there is a zero without a sign, as for compressed-tensors.
    return round_codes(groups * inverse_scale(byte.clamp(max=254), groups.dtype).unsqueeze(-1))


def _search_scale(groups: Tensor, byte: Tensor) -> None:
    """Lower the EVEN bytes in place by one where the squared error of the group falls.

    Only groups that EVEN raised (m >= 1.75) need a look: below 7 * 2**floor every point of the coarser grid
    {0, 1, 2, 3, 4, 6} lies on the finer grid too, so that the larger scale cannot win there.
    """
    bits = groups.abs().amax(-1).float().view(torch.int32)
    raised = ((bits & 0x7FFFFF) >= 0x600000) & (byte > 0) & (byte != INVALID_SCALE)
    where = raised.nonzero(as_tuple=True)
    band, high = groups[where], byte[where]
    low = high - 1

    def error(b: Tensor) -> Tensor:
        # In float64 the differences of bfloat16 weights and their squares are exact: the same choice on every device.
        value = code_values(_codes(band, b), torch.float64) * exponent_value(b).double().unsqueeze(-1)
        return (value - band.double()).square().sum(-1)

    byte[where] = torch.where(error(low) < error(high), low, high)


def _refuse_invalid(rows: Tensor, scale: Tensor, shape: tuple[int, ...], name: str) -> None:
    bad = (scale == INVALID_SCALE).any(-1).nonzero().flatten()
    if not len(bad):
        return
    row = int(bad[0])
    values = rows[row].float()
    if values.isnan().any():
        what = "NaN"
    elif values.isinf().any():
        what = "Inf"
    else:
        what = f"a magnitude of {values.abs().max().item():.4g}, beyond the largest 1.75 * 2**127"
    index = list(torch.unravel_index(torch.tensor(row), shape[:-1]))
    raise WeightsError(
        f"{name}: {what} at {_row_text([int(i) for i in index])} ({len(bad)} rows affected); "
        "such a group would be stored as zeros. Repair or retrain the tensor before quantising"
    )


def _row_text(index: list[int]) -> str:
    return f"row {index[0]}" if len(index) == 1 else f"expert {index[-2]}, row {index[-1]}"


def _warn_unusual(scale: Tensor, name: str) -> None:
    low, high = SAFE_SCALE_BYTES
    outside = int(((scale < low) | (scale > high)).sum())
    if outside:
        small = int((scale < low).sum())
        warnings.warn(
            f"{name}: {outside} of {scale.numel()} scale bytes lie outside [{low}, {high}] "
            f"({small} groups are zero or tiny, {outside - small} huge); the bytes equal compressed-tensors', "
            "but one consumer refuses bytes above 249 and some read byte 0 as zero",
            MXFP4ScaleWarning,
            stacklevel=3,
        )


def _table(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=dtype, device=device)
