"""Rows times their experts: against float64, with experts of no row, one and more than a tile."""

from typing import Any

import pytest
import torch

from k3kernels.few_rows import few_rows_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("counts", "out", "width"), [([0, 1, 0, 3], 70, 40), ([20, 0, 1], 64, 160), ([0, 0], 64, 32)],
    ids=["few", "more than a tile", "none"],
)  # fmt: skip
def test_each_row_meets_its_expert(counts: list[int], out: int, width: int, backend: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), width, generator=generator).to(dtype)
    weight = torch.randn(len(counts), out, width, generator=generator).to(dtype)
    y = few_rows_linear(x.to(DEVICE), weight.to(DEVICE), torch.tensor(counts, device=DEVICE), backend=backend).cpu()
    want = torch.cat([a.double() @ w.double().T for a, w in zip(x.split(counts), weight)])
    assert y.dtype == dtype and y.shape == want.shape
    if want.numel():
        assert float((y.double() - want).abs().max() / want.abs().max()) < (1e-2 if dtype == torch.bfloat16 else 2e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": torch.zeros(2, 8, 5)}, ValueError, "weight: expected shape"),
        ({"weight": torch.zeros(2, 8, 4).bfloat16()}, TypeError, "x, weight: expected one dtype"),
        ({"counts": torch.tensor([3])}, ValueError, r"counts: expected integers \[E\] = \[2\]"),
    ],
    ids=["width", "dtype", "experts"],
)
def test_bad_argument_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"x": torch.zeros(3, 4), "weight": torch.zeros(2, 8, 4), "counts": torch.tensor([1, 2])}
    with pytest.raises(error, match=message):
        few_rows_linear(**{**good, **change})
