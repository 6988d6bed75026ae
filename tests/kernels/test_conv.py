"""The short convolution: torch path against the document loop in fp64, and against conv1d."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.conv import short_convolution
from tests.kernels.helpers import assert_close, outputs_and_gradients, relative_error


def conv_inputs(B: int = 1, T: int = 20, C: int = 6, W: int = 4, documents: int | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"x": (B, T, C), "weight": (C, W), "initial_state": (documents or B, C, W - 1)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def compare(inputs: dict[str, Tensor], **options: Any) -> None:
    for names in (("x", "weight", "initial_state"), ("x", "weight")):
        chosen = {name: inputs[name] for name in names}
        expected, labels = outputs_and_gradients(short_convolution, chosen, backend="naive", **options)
        actual, _ = outputs_and_gradients(short_convolution, chosen, backend="torch", **options)
        assert_close(actual, expected, labels, 1e-12)
        actual, _ = outputs_and_gradients(short_convolution, chosen, torch.float32, backend="torch", **options)
        assert_close(actual, expected, labels, 1e-5)


@pytest.mark.parametrize("W", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 33])
def test_any_length_and_width(T: int, W: int) -> None:
    compare(conv_inputs(B=2, T=T, W=W))


@pytest.mark.parametrize(
    "cu_seqlens",
    [[0, 20], [0, 0, 20], [0, 20, 20], [0, 1, 2, 3, 20], [0, 2, 4, 4, 4, 7, 20], list(range(21))],
    ids=["one", "empty first", "empty last", "three of one token", "short and empty", "all of one token"],
)
def test_packed_documents(cu_seqlens: list[int]) -> None:
    compare(conv_inputs(documents=len(cu_seqlens) - 1), cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32))


def test_equals_conv1d() -> None:
    inputs = conv_inputs(B=3, T=17)
    y, _ = short_convolution(inputs["x"], inputs["weight"])
    expected = F.silu(F.conv1d(F.pad(inputs["x"].mT, (3, 0)), inputs["weight"].unsqueeze(1), groups=6)).mT
    assert relative_error(y, expected) < 1e-14


def test_a_stream_in_two_pieces_equals_one() -> None:
    inputs = conv_inputs(T=20)
    whole, end = short_convolution(**inputs, output_final_state=True)
    for cut in (1, 2, 3, 11):
        first, state = short_convolution(
            inputs["x"][:, :cut], inputs["weight"], initial_state=inputs["initial_state"], output_final_state=True
        )
        second, last = short_convolution(
            inputs["x"][:, cut:], inputs["weight"], initial_state=state, output_final_state=True
        )
        assert_close([torch.cat([first, second], 1), last], [whole, end], ["y", "state"], 1e-14)


def test_bf16_is_rounded_once() -> None:
    inputs = conv_inputs(T=50)
    x = inputs["x"].bfloat16()
    y, state = short_convolution(x, inputs["weight"].float(), output_final_state=True)
    assert y.dtype == torch.bfloat16
    assert state is not None and state.dtype == torch.bfloat16
    exact, _ = short_convolution(x.double(), inputs["weight"].float().double(), backend="naive")
    assert torch.equal(y, exact.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(20, 6)}, r"x: expected shape \[B, T, C\]"),
        ({"weight": torch.zeros(6, 1, 4)}, r"weight: expected shape \[C, W\]"),
        ({"weight": torch.zeros(5, 4)}, r"weight: .*got \[5, 4\]"),
        ({"initial_state": torch.zeros(1, 6, 4)}, r"initial_state: .*\[1, 6, 3\], got \[1, 6, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 30])}, r"cu_seqlens: .*end at T = 20"),
        ({"backend": "fast"}, r"backend: .*'fast'"),
    ],
    ids=["flat x", "conv1d's weight", "other channels", "state of four inputs", "cu_seqlens too long", "backend"],
)
def test_bad_argument_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        short_convolution(**{**conv_inputs(), **change})
