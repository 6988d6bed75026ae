"""FP8 copies: how far they are from the tensor, and one pass on the device like the plain form."""

from __future__ import annotations

import pytest
import torch

from k3kernels import fp8


def sample(rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=g) * torch.logspace(-6, 6, rows)[:, None]
    x[0] = 0.0
    x[1, : width // 2] = 0.0
    return x.to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [32, 128, 200, 512])
def test_a_copy_is_within_a_sixteenth_of_every_value(width: int, dtype: torch.dtype) -> None:
    x = sample(17, width, dtype)
    values, scales = fp8.quantise(x)
    assert values.dtype == torch.float8_e4m3fn and values.shape == x.shape
    assert scales.shape == (17, -(-width // fp8.BLOCK))
    back = fp8.dequantise(values, scales, torch.float32)
    largest = scales.repeat_interleave(fp8.BLOCK, 1)[:, :width]
    assert bool(((back - x.float()).abs() <= x.float().abs() / 16 + largest * 2**-10).all())
    assert not back[0].any(), "zeros stay zeros"
    error = float((back - x.float()).norm() / x.float().norm())
    assert 0.01 < error < 0.04, error
    assert fp8.dequantise(values, scales, dtype).dtype == dtype


def test_what_is_not_finite_does_not_hide() -> None:
    x = torch.ones(2, 256)
    x[0, 3] = float("inf")
    back = fp8.dequantise(*fp8.quantise(x), torch.float32)
    assert back[0, :128].isnan().any() and torch.equal(back[0, 128:], x[0, 128:]) and torch.equal(back[1], x[1])


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        fp8.quantise(torch.ones(2, 2, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [32, 128, 200, 768])
def test_one_pass_on_the_device_is_the_plain_form(width: int, dtype: torch.dtype) -> None:
    x = sample(1000, width, dtype, "cuda")
    plain, passed = (fp8.quantise(x, backend=b) for b in ("torch", "triton"))
    torch.testing.assert_close(passed[1], plain[1])
    backs = [fp8.dequantise(*pair, torch.float32, backend=b) for pair, b in ((plain, "torch"), (passed, "triton"))]
    # a quotient next to the middle of two values may round either way
    assert bool(
        ((backs[1] - backs[0]).abs() <= backs[0].abs() / 8 + plain[1].max(1, keepdim=True).values * 2**-9).all()
    )
    assert float(((backs[1] - backs[0]) != 0).float().mean()) < 1e-3
