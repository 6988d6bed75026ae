"""One token of three convolutions in one launch is each of them alone, outputs and states."""

import pytest
import torch

from k3kernels.conv import short_convolution_step
from k3kernels.conv.step import short_convolution_step_qkv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("batch", "channels", "width"), [(3, 40, 4), (1, 300, 3), (2, 16, 2)])
def test_three_at_once_are_each_alone(batch: int, channels: int, width: int, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def three(*shape: int) -> list[torch.Tensor]:
        return [torch.randn(*shape, generator=generator).to(DEVICE) for _ in range(3)]

    weights, states = three(channels, width), three(batch, channels, width - 1)
    alone = [s.clone() for s in states]
    for _ in range(width + 1):
        xs = three(batch, channels)
        got = short_convolution_step_qkv(tuple(xs), tuple(weights), tuple(states), backend=backend)
        for x, w, s, t, y in zip(xs, weights, alone, states, got):
            assert torch.allclose(y, short_convolution_step(x[:, None], w, s, backend="torch")[:, 0], atol=1e-6)
            assert torch.equal(s, t)


@pytest.mark.parametrize("at", ["xs", "weights", "states"])
def test_a_shape_that_does_not_fit_is_named(at: str) -> None:
    good = {"xs": [torch.zeros(2, 8)] * 3, "weights": [torch.zeros(8, 4)] * 3, "states": [torch.zeros(2, 8, 3)] * 3}
    good[at] = [*good[at][:2], torch.zeros(2, 9)]
    with pytest.raises(ValueError, match=rf"{at}\[2\]: expected shape"):
        short_convolution_step_qkv(*(tuple(v) for v in good.values()))
