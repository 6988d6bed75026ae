"""Triton kernels of the convolution, the gated norm and the decode step, against the torch path in fp64.

On a machine without a GPU they run under Triton's interpreter (small sizes, fp32), which shows their logic but not
races, layouts or compiler faults; with a GPU the same tests run the compiled kernels.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from k3kernels.conv import short_convolution, short_convolution_qkv, short_convolution_step
from k3kernels.kda import kda_decode
from k3kernels.norm import gated_rms_norm
from tests.kernels.helpers import assert_close, kda_inputs, outputs_and_gradients

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)


def conv_inputs(B: int, T: int, C: int, W: int, documents: int) -> dict[str, Tensor]:
    return {"x": random(B, T, C), "weight": random(C, W, seed=1), "initial_state": random(documents, C, W - 1, seed=2)}


@pytest.mark.parametrize("state", [True, False], ids=["initial state", "no state"])
@pytest.mark.parametrize(
    ("B", "T", "C", "W", "cu_seqlens"),
    [
        (2, 9, 5, 4, None),
        (1, 1, 16, 4, None),
        (2, 2, 3, 4, None),
        (1, 20, 8, 3, None),
        (1, 7, 8, 2, None),
        (1, 5, 8, 1, None),
        (1, 20, 6, 4, [0, 1, 2, 3, 20]),
        (1, 12, 6, 4, [0, 0, 2, 5, 5, 8, 12, 12]),
        (1, 12, 6, 4, [0, 0, 0, 0, 5, 12, 12, 12]),
        (1, 37, 4, 4, [0, 15, 17, 37]),
        (1, 0, 4, 4, [0, 0]),
    ],
    ids=[
        "batch", "one token", "shorter than the taps", "three taps", "two taps", "one tap", "documents of one token",
        "short and empty documents", "empty documents at both ends", "document borders at a block border", "no tokens",
    ],
)  # fmt: skip
def test_convolution(
    monkeypatch: pytest.MonkeyPatch, B: int, T: int, C: int, W: int, cu_seqlens: list[int] | None, state: bool
) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr("k3kernels.conv.triton_conv.ROWS", 16)  # the interpreter pays for every row of a block
    boundaries = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    inputs = conv_inputs(B, T, C, W, B if cu_seqlens is None else len(cu_seqlens) - 1)
    if not state:
        inputs.pop("initial_state")
    expected, names = outputs_and_gradients(short_convolution, inputs, backend="naive", cu_seqlens=boundaries)
    actual, _ = outputs_and_gradients(short_convolution, inputs, torch.float32, backend="triton", cu_seqlens=boundaries)
    assert_close(actual, expected, names, 1e-5)


@pytest.mark.parametrize("state", [True, False], ids=["initial states", "no states"])
def test_three_convolutions_in_one_launch(state: bool) -> None:
    xs = [random(1, 11, C, seed=i) for i, C in enumerate((6, 6, 300))]  # v needs more channel blocks than q and k
    weights = [random(x.shape[2], 4, seed=5) for x in xs]
    states = tuple(random(2, x.shape[2], 3, seed=7) for x in xs) if state else None
    boundaries = torch.tensor([0, 4, 11], dtype=torch.int32)

    def run(dtype: torch.dtype, backend: str) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (*xs, *weights, *(states or ()))]
        initial = (leaves[6], leaves[7], leaves[8]) if state else None
        *ys, finals = short_convolution_qkv(
            *leaves[:6], cu_seqlens=boundaries, initial_states=initial, output_final_state=True, backend=backend
        )
        assert finals is not None
        outputs = [*ys, *finals]
        loss = sum((y * random(*y.shape, seed=11).to(dtype)).sum() for y in outputs)
        return [*outputs, *torch.autograd.grad(loss, leaves)]

    expected = run(torch.float64, "naive")
    names = [f"value {i}" for i in range(len(expected))]
    assert_close(run(torch.float64, "torch"), expected, names, 1e-12)
    assert_close(run(torch.float32, "triton"), expected, names, 1e-5)


def test_convolution_of_strided_rows() -> None:
    wide = random(2, 9, 16).float()
    weight = random(8, 4, seed=1).float()
    expected, _ = short_convolution(wide[..., 8:].contiguous(), weight, backend="torch")
    actual, _ = short_convolution(wide[..., 8:], weight, backend="triton")
    assert_close([actual], [expected], ["y"], 1e-6)


def test_convolution_wider_than_four_taps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight: Triton takes W <= 4, got 5; use backend='torch'"):
        short_convolution(random(1, 9, 4).float(), random(4, 5).float(), backend="triton")


@pytest.mark.parametrize("tokens", [1, 2, 6], ids=lambda n: f"{n} tokens a step")
@pytest.mark.parametrize("W", [1, 2, 4], ids=lambda n: f"width {n}")
def test_convolution_steps(W: int, tokens: int) -> None:
    x, weight = random(2, 6, 10).float()[..., 1:9], random(8, W, seed=1).float()
    cache = random(2, 3, 8, W - 1, seed=2).float()
    before, state = cache.clone(), cache[:, 1]  # a strided view into a cache of three layers
    expected, end = short_convolution(x, weight, initial_state=state, output_final_state=True, backend="torch")
    steps = [short_convolution_step(x[:, t : t + tokens], weight, state, backend="triton") for t in range(0, 6, tokens)]
    assert_close([torch.cat(steps, 1), state], [expected, end], ["y", "state"], 1e-6)
    assert torch.equal(cache[:, [0, 2]], before[:, [0, 2]])


def test_convolution_step_that_triton_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match=r"backend: triton takes W <= 4 .*got W = 5, torch.float32"):
        short_convolution_step(random(1, 1, 4).float(), random(4, 5).float(), random(1, 4, 4).float(), backend="triton")


@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 4, 32), (9, 5), (3000, 4), (0, 8)], ids=str)
def test_gated_norm(shape: tuple[int, ...]) -> None:
    inputs = [random(*shape), random(*shape, seed=1), random(shape[-1], seed=2)]

    def run(dtype: torch.dtype, backend: str) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        y = gated_rms_norm(*leaves, backend=backend)
        return [y, *torch.autograd.grad((y * random(*shape, seed=3).to(dtype)).sum(), leaves)]

    assert_close(run(torch.float32, "triton"), run(torch.float64, "naive"), ["y", "do", "dgate", "dweight"], 1e-5)


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "softplus"])
@pytest.mark.parametrize(("K", "V"), [(16, 16), (32, 64), (5, 9)], ids=str)
def test_decode(K: int, V: int, bound: float | None) -> None:
    inputs = {n: x.to(DEVICE) for n, x in kda_inputs(B=2, T=3, H=1, HV=2, K=K, V=V).items()}
    initial = inputs.pop("initial_state")
    expected_state, state = initial.clone(), initial.float()
    expected = kda_decode(**inputs, state=expected_state, bound=bound, backend="torch")
    actual = kda_decode(**{n: x.float() for n, x in inputs.items()}, state=state, bound=bound, backend="triton")
    assert_close([actual, state], [expected, expected_state], ["o", "state"], 1e-5)


def test_decode_into_a_strided_state() -> None:
    inputs = {n: x.to(DEVICE).float() for n, x in kda_inputs(B=2, T=1).items()}
    expected = inputs.pop("initial_state")
    cache = torch.zeros(2, 5, 2, 16, 16, device=DEVICE)
    cache[:, 3] = expected
    kda_decode(**inputs, state=cache[:, 3], backend="triton")
    kda_decode(**inputs, state=expected, backend="torch")
    assert_close([cache[:, 3]], [expected], ["state"], 1e-5)
    assert not cache[:, [0, 1, 2, 4]].any()


# The rest needs a device: real sizes, bf16, determinism, graphs.


def gpu_conv(dtype: torch.dtype) -> dict[str, Tensor]:
    x = {"x": random(1, 5000, 1536), "weight": random(1536, 4, seed=1), "initial_state": random(4, 1536, 3, seed=2)}
    return {"x": x["x"].to(dtype), "weight": x["weight"].float(), "initial_state": x["initial_state"].to(dtype)}


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs one CUDA device")
class TestOnDevice:
    boundaries = torch.tensor([0, 1, 2049, 2049, 5000], dtype=torch.int32)

    @pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)], ids=["fp32", "bf16"])
    def test_convolution_of_real_size(self, dtype: torch.dtype, tol: float) -> None:
        inputs = gpu_conv(dtype)
        exact = {n: x.double() for n, x in inputs.items()}
        for where in ("cpu", DEVICE):
            options = {"cu_seqlens": self.boundaries.to(where)}
            expected, names = outputs_and_gradients(short_convolution, exact, backend="torch", **options)
            actual, _ = outputs_and_gradients(short_convolution, inputs, backend="auto", **options)
            assert_close(actual, expected, names, tol)

    @pytest.mark.parametrize("V", [16, 64, 128, 256, 100])
    @pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)], ids=["fp32", "bf16"])
    def test_norm_of_real_size(self, dtype: torch.dtype, tol: float, V: int) -> None:
        o, gate = random(1, 3000, 12, V).to(dtype), random(1, 3000, 12, V, seed=1).to(dtype)
        weight = random(V, seed=2).float()

        def run(leaves: list[Tensor], backend: str) -> list[Tensor]:
            leaves = [x.requires_grad_() for x in leaves]
            y = gated_rms_norm(leaves[0], leaves[1], leaves[2], backend=backend)
            return [y, *torch.autograd.grad((y * random(*y.shape, seed=3).to(y.dtype)).sum(), leaves)]

        expected = run([x.double() for x in (o, gate, weight)], "naive")
        assert_close(run([o, gate, weight], "auto"), expected, ["y", "do", "dgate", "dweight"], tol)

    @pytest.mark.parametrize(("K", "V"), [(16, 16), (64, 64), (128, 128), (256, 256), (128, 64)], ids=str)
    @pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "softplus"])
    def test_decode_of_real_size(self, bound: float | None, K: int, V: int) -> None:
        inputs = {n: x.to(DEVICE) for n, x in kda_inputs(B=64, T=2, H=8, HV=16, K=K, V=V).items()}
        initial = inputs.pop("initial_state")
        inputs = {n: x.bfloat16() if n in ("q", "k", "v", "z", "beta") else x.float() for n, x in inputs.items()}
        expected_state, state = initial.clone(), initial.float()
        expected = kda_decode(**{n: x.double() for n, x in inputs.items()}, state=expected_state, bound=bound)
        actual = kda_decode(**inputs, state=state, bound=bound)
        assert_close([actual, state], [expected, expected_state], ["o", "state"], 5e-3)
        assert_close([state], [expected_state], ["state"], 1e-5)

    def test_runs_are_bitwise_equal(self) -> None:
        first, _ = outputs_and_gradients(short_convolution, gpu_conv(torch.bfloat16), cu_seqlens=self.boundaries)
        for _ in range(20):
            again, _ = outputs_and_gradients(short_convolution, gpu_conv(torch.bfloat16), cu_seqlens=self.boundaries)
            assert all(torch.equal(a, b) for a, b in zip(first, again))

    def test_a_decode_step_can_be_captured(self) -> None:
        inputs: dict[str, Any] = {n: x.to(DEVICE).float() for n, x in kda_inputs(B=4, T=1, K=64, V=64).items()}
        initial = inputs.pop("initial_state")
        state, conv_state = initial.clone(), torch.zeros(4, 64, 3, device=DEVICE)
        x, weight = random(4, 1, 64).float(), random(64, 4).float()

        def step() -> Tensor:
            short_convolution_step(x, weight, conv_state)
            return kda_decode(**inputs, state=state)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()  # compiles
        torch.cuda.synchronize()
        state.copy_(initial)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = step()
        graph.replay()
        torch.cuda.synchronize()
        expected_state = initial.double()
        expected = kda_decode(**{n: t.double() for n, t in inputs.items()}, state=expected_state)
        assert_close([o, state], [expected, expected_state], ["o", "state"], 1e-5)
