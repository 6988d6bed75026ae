"""Rows times packed experts: torch against decoded weights, Triton (interpreted, or on a GPU) against torch."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k3kernels.mxfp4 import decode, mxfp4_grouped_linear
from k3kernels.mxfp4.reference import VALUES

on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"


def experts(count: int, out: int, width: int, low: int = 118, high: int = 128) -> tuple[Tensor, Tensor]:
    """Random codes and scale bytes low..high-1."""
    generator = torch.Generator().manual_seed(3)
    packed = torch.randint(0, 256, (count, out, width // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(low, high, (count, out, width // 32), generator=generator, dtype=torch.uint8)
    return packed, scale


def expected(x: Tensor, packed: Tensor, scale: Tensor, counts: list[int]) -> Tensor:
    """In float64 from decoded weights."""
    weight = decode(packed, scale).double()
    return torch.cat([part.double() @ w.T for part, w in zip(x.split(counts), weight)])


def check(x: Tensor, packed: Tensor, scale: Tensor, counts: list[int], backend: str, device: str = DEVICE) -> None:
    moved = (t.to(device) for t in (x, packed, scale, torch.tensor(counts)))
    y = mxfp4_grouped_linear(*moved, backend=backend).cpu()
    assert y.dtype == x.dtype
    want = expected(x, packed, scale, counts)
    if want.numel():
        error = (y.double() - want).abs().max() / want.abs().max()
        assert error < (8e-3 if x.dtype == torch.bfloat16 else 5e-6), float(error)


def test_decode_equals_the_golden_table(golden: Any) -> None:
    table = load_file(golden / "mxfp4" / "mxfp4_golden.safetensors")
    packed, scale = table["gauss_bf16.packed"], table["gauss_bf16.scale"]
    assert torch.equal(
        decode(packed, scale, torch.bfloat16).view(torch.int16), table["gauss_bf16.dequant_bf16bits"].view(torch.int16)
    )


COUNTS = {
    "one row in all": [0, 1, 0],
    "no rows": [0, 0, 0],
    "an expert without rows between others": [3, 0, 5],
    "more rows than a tile in one expert": [2, 37, 1],
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_the_product_is_that_of_decoded_weights(counts: list[int], backend: str) -> None:
    packed, scale = experts(3, 70, 160)  # neither a multiple of a tile
    x = torch.randn(sum(counts), 160, generator=torch.Generator().manual_seed(1))
    check(x, packed, scale, counts, backend)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_bfloat16_rows_are_rounded_once(backend: str) -> None:
    packed, scale = experts(2, 64, 128)
    check(torch.randn(9, 128, generator=torch.Generator().manual_seed(1)).bfloat16(), packed, scale, [4, 5], backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_every_code_under_every_scale_is_exact(backend: str, dtype: torch.dtype) -> None:
    """Unit rows pick single weights. Scale bytes 0-252: above, the largest codes leave the range of the dtype."""
    codes = torch.arange(32, dtype=torch.uint8) % 16
    packed = (codes[0::2] | codes[1::2] << 4).expand(1, 253, 16).contiguous()
    scale = torch.arange(253, dtype=torch.uint8).view(1, 253, 1)
    want = decode(packed, scale, dtype)[0].T
    moved = (t.to(DEVICE) for t in (torch.eye(32, dtype=dtype), packed, scale, torch.tensor([32])))
    y = mxfp4_grouped_linear(*moved, backend=backend).cpu()
    # The interpreter's bfloat16 and tensor cores may flush subnormals: bytes 0-3.
    flushes = backend == "triton" and (on_gpu or dtype == torch.bfloat16)
    normal = slice(4 if flushes else 0, None)
    assert torch.equal(y[:, normal], want[:, normal])
    assert float(y[:, :4].abs().max()) <= 2**-121


def test_the_instructions_of_the_gpu_decoder_give_every_code() -> None:
    """The moves of the PTX on every pair of neighbouring codes, as integers, and both ways of scaling."""
    from k3kernels.mxfp4.triton_linear import MOVES

    word = torch.arange(1 << 16)
    codes = torch.stack([(word >> 4 * i) & 15 for i in range(4)])
    want = torch.tensor(VALUES)[codes]
    for i, (sign, magnitude) in enumerate(MOVES):
        moved = [(word << n if n >= 0 else word >> -n) for n in (sign, magnitude)]
        bits = (moved[0] & 0x8000) | (moved[1] & 0x01C0)
        value = (bits << 16).to(torch.int32).view(torch.float32)
        assert torch.equal(value * 2.0**126, want[i])
        for byte in (1, 64, 127, 128):
            scale = torch.tensor((byte + 126) << 23, dtype=torch.int32).view(torch.float32)
            assert torch.equal(value.double() * scale.double(), want[i].double() * 2.0 ** (byte - 127))


@pytest.mark.parametrize("width", [32, 96, 128, 160, 256])
def test_columns_keep_their_partners_when_x_is_permuted(width: int) -> None:
    """Place 64 (j // 2) + 8 c + 2 t + j % 2 of a block holds column 32 t + 8 j + c; what is beyond the width is zero."""
    from k3kernels.mxfp4.triton_linear import permuted

    x = torch.arange(1, width + 1).float().view(1, width).to(DEVICE)
    y = permuted(x).flatten().tolist()
    for column in range(-(-width // 128) * 128):
        block, inside = divmod(column, 128)
        t, j, c = inside // 32, inside // 8 % 4, inside % 8
        place = 128 * block + 64 * (j // 2) + 8 * c + 2 * t + j % 2
        assert y[place] == (column + 1 if column < width else 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(3, 48)}, ValueError, "x: expected a width that is a multiple of 32, got 48"),
        ({"x": torch.zeros(3, 64).half()}, TypeError, "x: expected bfloat16 or float32"),
        ({"scale": torch.zeros(2, 8, 4, dtype=torch.uint8)}, ValueError, r"scale: expected shape \[2, 8, 2\]"),
        ({"packed": torch.zeros(2, 8, 32)}, TypeError, "packed: expected uint8"),
        ({"counts": torch.tensor([1, 1])}, ValueError, "counts: must not be negative and must add up to N = 3"),
        ({"counts": torch.tensor([3])}, ValueError, r"counts: expected shape \[E\] = \[2\]"),
        ({"backend": "cuda"}, ValueError, "backend: expected one of auto, torch, triton"),
    ],
    ids=["width", "dtype of x", "scale", "packed", "sum of counts", "experts", "backend"],
)
def test_bad_argument_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    packed, scale = experts(2, 8, 64)
    good = {"x": torch.zeros(3, 64), "packed": packed, "scale": scale, "counts": torch.tensor([1, 2])}
    with pytest.raises(error, match=message):
        mxfp4_grouped_linear(**{**good, **change})


@pytest.mark.gpu
@pytest.mark.skipif(not on_gpu, reason="needs a CUDA device")
@pytest.mark.parametrize("width", [3584, 3072, 544], ids=lambda n: f"width {n}")
@pytest.mark.parametrize("rows", [1, 4, 16, 17, 64, 200], ids=lambda n: f"{n} rows an expert")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_on_a_gpu_at_wide_experts(rows: int, dtype: torch.dtype, width: int) -> None:
    packed, scale = experts(5, 700, width)
    counts = [rows, 2 * rows, 0, 1, rows]
    x = torch.randn(sum(counts), width, generator=torch.Generator().manual_seed(1)).to(dtype)
    check(x, packed, scale, counts, "auto")


@pytest.mark.gpu
@pytest.mark.skipif(not on_gpu, reason="needs a CUDA device")
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("outputs", [64, 128, 256])
def test_every_tile_is_right_and_small_scales_change_no_bit(outputs: int, blocks: int, warps: int) -> None:
    if outputs < 16 * warps:
        pytest.skip("fewer outputs than the warps hold")
    from k3kernels.mxfp4.triton_linear import Tile, grouped_linear_triton

    packed, scale = (t.cuda() for t in experts(4, 512, 1024, low=1, high=129))
    x = torch.randn(40, 1024, device="cuda").bfloat16()
    counts = torch.tensor([20, 0, 3, 17], device="cuda")
    tile = Tile(16, outputs, blocks, warps, 3)
    plain, small = (grouped_linear_triton(x, packed, scale, counts, tile, n) for n in (254, 128))
    assert torch.equal(plain, small)
    want = expected(x.cpu(), packed.cpu(), scale.cpu(), counts.tolist())
    assert float((plain.cpu().double() - want).abs().max() / want.abs().max()) < 8e-3
