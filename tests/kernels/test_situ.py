"""SiTU-GLU on Triton against autograd of the formula in fp64 (interpreted without a GPU)."""

import pytest
import torch
from torch import Tensor

from k3kernels.situ import situ_glu, situ_glu_packed
from tests.kernels.helpers import assert_close

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BETAS = {"beta": 4.0, "linear_beta": 25.0}


def inputs(N: int, h: int, spread: float, *, scaled: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = spread * torch.randn(N, 2 * h, generator=generator, dtype=torch.float64)
    return (x.to(DEVICE), *[torch.rand(N, generator=generator, dtype=torch.float64).to(DEVICE)] * scaled)


def run(
    given: tuple[Tensor, ...], dtype: torch.dtype, backend: str, *, packed: bool = False, **betas: float | None
) -> list[Tensor]:
    leaves = [t.to(dtype).requires_grad_() for t in given]
    x, scale = leaves[0], leaves[1] if len(leaves) > 1 else None
    options = {**BETAS, **betas, "scale": scale, "backend": backend}
    if packed:
        y = situ_glu_packed(x, **options)  # type: ignore[arg-type]
    else:
        h = x.shape[1] // 2
        y = situ_glu(x[:, :h], x[:, h:], **options)  # type: ignore[arg-type]
    probe = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=DEVICE).view_as(y).to(dtype)
    return [y, *torch.autograd.grad((y * probe).sum(), leaves)]


@pytest.mark.parametrize("packed", [False, True], ids=["two tensors", "one product's output"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled rows"])
@pytest.mark.parametrize(
    ("N", "h", "spread"), [(7, 5, 1.0), (3, 40, 1e-3), (4, 16, 100.0), (2, 1030, 3.0), (0, 8, 1.0)],
    ids=["small", "near zero", "saturated", "two blocks of columns", "no rows"],
)  # fmt: skip
def test_values_and_gradients(N: int, h: int, spread: float, scaled: bool, packed: bool) -> None:
    given = inputs(N, h, spread, scaled=scaled)
    names = ["y", "dx", "dscale"][: 1 + len(given)]
    expected = run(given, torch.float64, "torch")
    assert_close(run(given, torch.float32, "triton", packed=packed), expected, names, 3e-6)


@pytest.mark.parametrize(
    "betas", [{"linear_beta": None}, {"beta": 1.5}], ids=["an unbounded linear branch", "another bound of the gate"]
)
def test_other_bounds(betas: dict[str, float | None]) -> None:
    given = inputs(5, 8, 30.0, scaled=False)
    expected = run(given, torch.float64, "torch", **betas)
    assert_close(run(given, torch.float32, "triton", **betas), expected, ["y", "dx"], 3e-6)


def test_only_the_inputs_are_kept() -> None:
    x, scale = (t.float().requires_grad_() for t in inputs(6, 8, 1.0, scaled=True))
    kept: set[int] = set()

    def keep(t: Tensor) -> Tensor:
        kept.add(t.untyped_storage().data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        situ_glu(x[:, :8], x[:, 8:], scale=scale, backend="triton", **BETAS)
        situ_glu_packed(x, scale=scale, backend="triton", **BETAS)
    assert kept == {x.untyped_storage().data_ptr(), scale.untyped_storage().data_ptr()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"up": torch.zeros(2, 5)}, "up: expected shape"),
        ({"up": torch.zeros(2, 4).bfloat16()}, "up: expected torch.float32 like gate"),
        ({"beta": 0.0}, "beta: expected a positive number, got 0.0"),
        ({"scale": torch.zeros(3)}, "scale: expected shape"),
        ({"backend": "naive"}, "backend: expected one of auto, torch, triton"),
    ],
    ids=["other shape", "other dtype", "zero beta", "short scale", "unknown backend"],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        situ_glu(**{"gate": torch.zeros(2, 4), "up": torch.zeros(2, 4), **BETAS, **change})  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs one CUDA device")
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 3e-6), (torch.bfloat16, 5e-3)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled rows"])
def test_real_size_and_bits(scaled: bool, dtype: torch.dtype, tol: float) -> None:
    given = tuple(t.to(dtype) for t in inputs(5000, 3072, 2.0, scaled=scaled))
    names = ["y", "dx", "dscale"][: 1 + len(given)]
    found = run(given, dtype, "auto")
    assert_close(found, run(tuple(t.double() for t in given), torch.float64, "torch"), names, tol)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(found, run(given, dtype, "auto", packed=True)))
