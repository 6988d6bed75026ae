"""The RMS norm on Triton against autograd of the formula in fp64 (interpreted without a GPU)."""

import pytest
import torch
from torch import Tensor

from k3kernels.norm import layer_rms_norm
from tests.kernels.helpers import assert_close

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ["y", "dx", "dweight"]


def run(x: Tensor, weight: Tensor, dtype: torch.dtype, backend: str, *, columns: int | None = None) -> list[Tensor]:
    """columns: x is the first of its columns, with strided rows."""
    leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
    y = layer_rms_norm(leaves[0][..., :columns], leaves[1], backend=backend)
    probe = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=DEVICE).view_as(y).to(dtype)
    return [y, *torch.autograd.grad((y * probe).sum(), leaves)]


def inputs(*shape: int, columns: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(columns or shape[-1], generator=generator, dtype=torch.float64)
    return x.to(DEVICE), weight.to(DEVICE)


@pytest.mark.parametrize(
    ("shape", "columns"), [((7, 16), None), ((2, 3, 40), None), ((5, 24), 9), ((0, 8), None), ((3, 2500), None)],
    ids=["rows", "leading dimensions", "strided rows", "no rows", "wider than a tile"],
)  # fmt: skip
def test_values_and_gradients(shape: tuple[int, ...], columns: int | None) -> None:
    x, weight = inputs(*shape, columns=columns)
    expected = run(x, weight, torch.float64, "torch", columns=columns)
    assert_close(run(x, weight, torch.float32, "triton", columns=columns), expected, NAMES, 2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(3)}, "weight: expected shape"),
        ({"weight": torch.ones(4).bfloat16()}, "weight: expected torch.float32 like x"),
        ({"eps": 0.0}, "eps: expected a positive number"),
        ({"backend": "naive"}, "backend: expected one of auto, torch, triton"),
    ],
    ids=["short weight", "other dtype", "zero eps", "unknown backend"],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        layer_rms_norm(**{"x": torch.zeros(2, 4), "weight": torch.ones(4), **change})  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs one CUDA device")
@pytest.mark.parametrize("d", [384, 896, 7168])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
def test_real_size_and_bits(dtype: torch.dtype, tol: float, d: int) -> None:
    x, weight = (t.to(dtype) for t in inputs(5000, d))
    found = run(x, weight, dtype, "auto")
    assert_close(found, run(x.double(), weight.double(), torch.float64, "torch"), NAMES, tol)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(found, run(x, weight, dtype, "auto")))
    if dtype == torch.bfloat16:  # the interpreter cuts bfloat16 off, so that only a device shows the rounding
        plain = run(x, weight, dtype, "torch")[0]
        assert (found[0] != plain).float().mean() < 0.01  # a statistic on the edge of rounding may fall either way
