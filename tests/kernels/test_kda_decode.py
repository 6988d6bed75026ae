"""Decoding token by token, state in place, equals the op on the whole sequence."""

import pytest
import torch

from k3kernels.conv import short_convolution, short_convolution_step
from k3kernels.kda import kda, kda_decode
from tests.kernels.helpers import assert_close, kda_inputs

TOKENWISE = ("q", "k", "v", "z", "beta")


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "softplus"])
@pytest.mark.parametrize("step", [1, 3], ids=["one token a step", "three tokens a step"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_steps_equal_the_whole_sequence(dtype: torch.dtype, step: int, bound: float | None) -> None:
    inputs = {n: x.to(dtype) for n, x in kda_inputs(B=3, T=12, H=2, HV=4, K=16, V=24).items()}
    expected, end = kda(**inputs, bound=bound, output_final_state=True, backend="naive")
    state = inputs.pop("initial_state").clone()
    outputs = []
    for t in range(0, 12, step):
        piece = {n: (x[:, t : t + step] if n in TOKENWISE else x) for n, x in inputs.items()}
        outputs.append(kda_decode(**piece, state=state, bound=bound))
    assert_close(
        [torch.cat(outputs, 1), state], [expected, end], ["o", "state"], 1e-12 if dtype == torch.float64 else 1e-5
    )


def test_the_state_may_be_a_view_into_a_cache() -> None:
    inputs = {n: x.float() for n, x in kda_inputs(B=2, T=1).items()}
    cache = torch.zeros(2, 5, 2, 16, 16)
    cache[:, 3] = inputs["initial_state"]
    _, end = kda(**inputs, output_final_state=True)
    inputs.pop("initial_state")
    kda_decode(**inputs, state=cache[:, 3])
    assert_close([cache[:, 3]], [end], ["state"], 1e-6)
    assert not cache[:, [0, 1, 2, 4]].any()


def test_bad_state_is_refused() -> None:
    inputs = kda_inputs(B=2, T=1)
    state = inputs.pop("initial_state")
    with pytest.raises(ValueError, match=r"state: expected shape \[N, HV, K, V\] = \[2, 2, 16, 16\], got \[1, 2"):
        kda_decode(**inputs, state=state[:1])
    with pytest.raises(TypeError, match=r"state: expected float32.*got torch.bfloat16"):
        kda_decode(**inputs, state=state.bfloat16())


@pytest.mark.parametrize("step", [1, 2, 5], ids=lambda n: f"{n} a step")
def test_convolution_steps_equal_the_whole_sequence(step: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, 10, 6), (6, 4)))
    state = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    expected, end = short_convolution(x, weight, initial_state=state, output_final_state=True)
    outputs = [short_convolution_step(x[:, t : t + step], weight, state) for t in range(0, 10, step)]
    assert_close([torch.cat(outputs, 1), state], [expected, end], ["y", "state"], 1e-14)
