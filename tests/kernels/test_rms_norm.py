"""The decode norm is the training path's norm, rounding included."""

import pytest
import torch

from k3kernels.norm.rms import rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("rows", "width"), [(3, 70), (1, 16), (5, 256)])
def test_it_divides_by_the_root_mean_square(rows: int, width: int, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, 2 * width, generator=generator)[:, ::2], torch.randn(width, generator=generator)
    want = weight.double() * x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    y = rms_norm(x.to(DEVICE), weight.to(DEVICE), backend=backend).cpu()
    assert torch.allclose(y.double(), want, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_bfloat16_is_rounded_before_the_weight(backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((40, 64), (64,)))
    rounded = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).bfloat16()
    y = rms_norm(x.to(DEVICE), weight.to(DEVICE), backend=backend).cpu()
    if backend == "triton" and DEVICE == "cpu":  # the interpreter cuts bfloat16 off instead of rounding it
        assert torch.allclose(y.float(), (weight * rounded).float(), rtol=2**-6)
        return
    assert (y != weight * rounded).float().mean() < 0.01  # a statistic on the edge of rounding may fall either way


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [(torch.zeros(7), ValueError, r"weight: expected shape"), (torch.zeros(8).half(), TypeError, "the dtype of x")],
    ids=["shape", "dtype"],
)
def test_a_weight_that_does_not_fit_is_refused(weight: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rms_norm(torch.zeros(2, 8), weight)
