"""The gated RMS norm: torch path against the formula in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from k3kernels.norm import gated_rms_norm
from tests.kernels.helpers import assert_close


def norm_inputs(*shape: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = {"o": shape, "gate": shape, "weight": shape[-1:]}
    return {name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in shapes.items()}


def output_and_gradients(inputs: dict[str, Tensor], dtype: torch.dtype, backend: str) -> list[Tensor]:
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    y = gated_rms_norm(**leaves, backend=backend)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)
    return [y, *torch.autograd.grad((y * weight).sum(), list(leaves.values()))]


@pytest.mark.parametrize("shape", [(7,), (5, 16), (2, 9, 3, 32), (0, 4)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3], ids=["ordinary", "small", "large"])
def test_torch_path_equals_the_formula(shape: tuple[int, ...], scale: float) -> None:
    inputs = norm_inputs(*shape)
    inputs["o"] *= scale
    expected = output_and_gradients(inputs, torch.float64, "naive")
    for dtype, tol in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        actual = output_and_gradients(inputs, dtype, "torch")
        assert_close(actual, expected, ["y", "do", "dgate", "dweight"], tol)


def test_bf16_is_rounded_once() -> None:
    inputs = norm_inputs(6, 32)
    o, gate, weight = inputs["o"].bfloat16(), inputs["gate"].bfloat16(), inputs["weight"].float()
    exact = gated_rms_norm(o.double(), gate.double(), weight.double(), backend="naive")
    assert torch.equal(gated_rms_norm(o, gate, weight), exact.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": torch.zeros(5, 15)}, r"gate: expected shape \[..., V\] = \[5, 16\], got \[5, 15\]"),
        ({"weight": torch.zeros(5)}, r"weight: expected shape \[V\] = \[16\], got \[5\]"),
        ({"eps": 0.0}, r"eps: expected a positive number, got 0.0"),
    ],
    ids=["gate", "weight", "eps"],
)
def test_bad_argument_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(**{**norm_inputs(5, 16), **change})
