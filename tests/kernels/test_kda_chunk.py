"""The chunked torch path against the token recurrence in fp64, on random and on hostile inputs."""

import time

import pytest
import torch
from torch import Tensor

from k3kernels.kda import kda
from k3kernels.kda.chunk_torch import chunked_recurrence, kda_torch
from k3kernels.kda.naive import kda_naive, l2_normalize, naive_recurrence
from tests.kernels.helpers import assert_close, kda_inputs, outputs_and_gradients, relative_error

BOUNDS = pytest.mark.parametrize(
    "bound", [-5.0, -5.9, -0.5, None], ids=["bound -5", "bound -5.9", "bound -0.5", "softplus"]
)


def compare(inputs: dict[str, Tensor], tol: float = 1e-10, tol32: float = 2e-5, **options: object) -> None:
    """Chunks in fp64 (the algebra) and in fp32 (the numerics) against the recurrence in fp64."""
    expected, names = outputs_and_gradients(kda, inputs, backend="naive", **options)
    actual, _ = outputs_and_gradients(kda, inputs, backend="torch", **options)
    assert_close(actual, expected, names, tol)
    actual, _ = outputs_and_gradients(kda, inputs, torch.float32, backend="torch", **options)
    assert_close(actual, expected, names, tol32)


@BOUNDS
@pytest.mark.parametrize("T", [1, 2, 7, 15, 16, 17, 31, 63, 65, 130])
def test_any_length(T: int, bound: float | None) -> None:
    compare(kda_inputs(B=2, T=T), bound=bound)


@BOUNDS
@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
def test_any_chunk_size(chunk: int, bound: float | None) -> None:
    inputs = kda_inputs(B=1, T=150, K=16, V=8)
    expected, names = outputs_and_gradients(kda, inputs, bound=bound, backend="naive")
    actual, _ = outputs_and_gradients(kda_torch, inputs, bound=bound, scale=0.25, chunk=chunk)
    assert_close(actual, expected, names, 1e-10)


@BOUNDS
@pytest.mark.parametrize(
    "cu_seqlens",
    [[0, 40], [0, 0, 40], [0, 40, 40], [0, 1, 2, 3, 40], [0, 15, 31, 31, 31, 40], [0, 1, 1, 18, 40], list(range(41))],
    ids=["one", "empty first", "empty last", "three of one token", "empty inside", "ragged", "all of one token"],
)
def test_packed_documents(cu_seqlens: list[int], bound: float | None) -> None:
    inputs = kda_inputs(T=40, documents=len(cu_seqlens) - 1)
    compare(inputs, bound=bound, cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32))


@pytest.mark.parametrize(
    ("K", "V"), [(16, 64), (64, 16), (128, 32), (256, 16), (60, 100), (5, 3)], ids=lambda size: str(size)
)
def test_head_sizes_that_differ(K: int, V: int) -> None:
    compare(kda_inputs(T=70, H=1, K=K, V=V), bound=-5.0)


@pytest.mark.parametrize(("H", "HV"), [(1, 4), (2, 6)])
def test_value_heads_in_groups(H: int, HV: int) -> None:
    compare(kda_inputs(B=2, T=33, H=H, HV=HV), bound=-5.0)


def activated(g: Tensor, k: Tensor | None = None, beta: float | None = None, seed: int = 0) -> list[Tensor]:
    """Inputs of the recurrence itself, with chosen log decays, keys and beta."""
    generator = torch.Generator().manual_seed(seed)
    B, T, H, K = g.shape
    q, random_k, v = (torch.randn(B, T, H, K, generator=generator, dtype=torch.float64) for _ in range(3))
    b = torch.rand(B, T, H, generator=generator, dtype=torch.float64)
    state = torch.randn(B, H, K, K, generator=generator, dtype=torch.float64)
    k = l2_normalize(random_k) if k is None else k
    return [l2_normalize(q), k, v, g, b if beta is None else torch.full_like(b, beta), state]


def spikes(T: int, H: int, K: int, depth: float) -> Tensor:
    """No decay, but for one deep step in a tenth of the places."""
    generator = torch.Generator().manual_seed(5)
    hit = torch.rand(1, T, H, K, generator=generator) < 0.1
    return torch.where(hit, depth, 0.0).double()


def identical_keys(T: int, H: int, K: int, noise: float) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    one = torch.randn(1, 1, H, K, generator=generator, dtype=torch.float64)
    return l2_normalize(one + noise * torch.randn(1, T, H, K, generator=generator, dtype=torch.float64))


def constant(value: float, T: int = 100) -> Tensor:
    return torch.full((1, T, 2, 32), value, dtype=torch.float64)


HOSTILE = {
    "every gate at -5": (activated(constant(-5.0)), -5.0),
    "every gate at -5.9": (activated(constant(-5.9)), -5.9),
    "every gate at -5 without a bound": (activated(constant(-5.0)), None),
    "no decay": (activated(constant(0.0)), -5.0),
    "hardly any decay": (activated(constant(-1e-3)), -5.0),
    "no decay without a bound": (activated(constant(0.0)), None),
    "gates of -40": (activated(constant(-40.0)), None),
    "spikes of -1000": (activated(spikes(100, 2, 32, -1000.0)), None),
    "spikes of -5": (activated(spikes(100, 2, 32, -5.0)), -5.0),
    "identical keys, beta .99, no decay": (activated(constant(0.0), identical_keys(100, 2, 32, 0.0), 0.99), -5.0),
    "identical keys, beta 1, no decay": (activated(constant(0.0), identical_keys(100, 2, 32, 0.0), 1.0), -5.0),
    "correlated keys, beta .9": (activated(constant(-0.05), identical_keys(100, 2, 32, 0.3), 0.9), -5.0),
    "identical keys, beta 1.9": (activated(constant(-0.05), identical_keys(100, 2, 32, 0.0), 1.9), -5.0),
    "beta 0": (activated(constant(-1.0), beta=0.0), -5.0),
    "beta 1": (activated(constant(-1.0), beta=1.0), -5.0),
    "zero keys": (activated(constant(-1.0), torch.zeros(1, 100, 2, 32, dtype=torch.float64)), -5.0),
}


@pytest.mark.parametrize("chunk", [16, 64], ids=["chunks of 16", "chunks of 64"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_recurrence(name: str, chunk: int) -> None:
    inputs, bound = HOSTILE[name]
    weights = [torch.randn(inputs[2].shape, dtype=torch.float64), torch.randn(inputs[5].shape, dtype=torch.float64)]

    def run(op: object, dtype: torch.dtype, **options: object) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        o, state = op(*leaves[:5], scale=0.2, initial_state=leaves[5], **options)  # type: ignore[operator]
        loss = (o * weights[0].to(dtype)).sum() + (state * weights[1].to(dtype)).sum()
        return [o, state, *torch.autograd.grad(loss, leaves)]

    expected = run(naive_recurrence, torch.float64)
    names = ["o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate"]
    for dtype, tol in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        assert_close(run(chunked_recurrence, dtype, bound=bound, chunk=chunk), expected, names, tol)


@BOUNDS
@pytest.mark.parametrize("change", ["large A_log", "gate +100", "gate -100", "zero q and k"])
def test_extreme_inputs_stay_finite_and_right(change: str, bound: float | None) -> None:
    inputs = kda_inputs(T=40)
    if change == "large A_log":
        inputs["A_log"] = torch.tensor([20.0, 200.0], dtype=torch.float64)
    elif change == "zero q and k":
        inputs["q"], inputs["k"] = torch.zeros_like(inputs["q"]), torch.zeros_like(inputs["k"])
    else:
        inputs["z"] = torch.full_like(inputs["z"], 100.0 if change == "gate +100" else -100.0)
    actual, names = outputs_and_gradients(kda, inputs, torch.float32, bound=bound, backend="torch")
    for name, x in zip(names, actual):
        assert torch.isfinite(x).all(), name
    expected, _ = outputs_and_gradients(kda, inputs, bound=bound, backend="naive")
    assert_close(actual[:2], expected[:2], names[:2], 2e-5)


@BOUNDS
def test_no_output_sees_a_later_gate(bound: float | None) -> None:
    inputs = kda_inputs(T=90, dtype=torch.float32)
    o, _ = kda(**inputs, bound=bound, backend="torch")
    for cut in (1, 15, 16, 40, 89):
        later = {name: x.clone() for name, x in inputs.items()}
        for name in ("q", "k", "v", "z", "beta"):
            later[name][:, cut:] += 3.0
        changed, _ = kda(**later, bound=bound, backend="torch")
        assert torch.equal(o[:, :cut], changed[:, :cut])
        assert not torch.equal(o[:, cut:], changed[:, cut:])


def test_a_nan_stays_in_its_document() -> None:
    inputs = kda_inputs(T=40, documents=2, dtype=torch.float32)
    inputs["v"][:, 3] = torch.nan
    o, state = kda(**inputs, cu_seqlens=torch.tensor([0, 20, 40]), output_final_state=True, backend="torch")
    assert state is not None
    assert torch.isnan(o[:, 3:20]).any()
    assert torch.isfinite(o[:, 20:]).all()
    assert torch.isfinite(state[1]).all()


def test_strided_inputs_equal_contiguous_ones() -> None:
    inputs = kda_inputs(B=2, T=33, K=16, V=16)
    expected, names = outputs_and_gradients(kda, inputs, backend="torch")
    strided = {name: torch.stack([x, x], -1)[..., 0] for name, x in inputs.items()}
    strided["q"] = inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided["k"].is_contiguous()
    actual, _ = outputs_and_gradients(kda, strided, backend="torch")
    assert_close(actual, expected, names, 1e-14)


def test_runs_are_bitwise_equal() -> None:
    inputs = kda_inputs(T=100, dtype=torch.float32)
    first, _ = outputs_and_gradients(kda, inputs, backend="torch")
    for _ in range(5):
        again, _ = outputs_and_gradients(kda, inputs, backend="torch")
        assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_bf16_inputs_keep_an_fp32_state() -> None:
    inputs = {name: x.bfloat16() for name, x in kda_inputs(T=64).items()}
    inputs["initial_state"] = inputs["initial_state"].float()
    o, state = kda(**inputs, output_final_state=True)
    assert o.dtype == torch.bfloat16
    assert state is not None and state.dtype == torch.float32
    exact, exact_state = kda(**{n: x.double() for n, x in inputs.items()}, output_final_state=True, backend="naive")
    assert relative_error(state, exact_state) < 1e-6
    assert relative_error(o, exact) < 4e-3  # one rounding to bf16


def test_long_memory_does_not_drift() -> None:
    inputs = kda_inputs(T=4096, H=1, K=16, V=16)
    inputs["z"] = torch.full_like(inputs["z"], -12.0)  # retention of about 1 - 3e-5 a step
    inputs["dt_bias"], inputs["A_log"] = torch.zeros_like(inputs["dt_bias"]), torch.zeros_like(inputs["A_log"])
    with torch.no_grad():
        expected = kda(**inputs, output_final_state=True, backend="naive")
        actual = kda(**{n: x.float() for n, x in inputs.items()}, output_final_state=True, backend="torch")
    assert_close(actual, expected, ["o", "state"], 1e-5)


def best_time(op: object, inputs: dict[str, Tensor], repeats: int) -> float:
    leaves = [x.requires_grad_() for name, x in inputs.items() if name != "initial_state"]
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        o, _ = op(*leaves, bound=-5.0, scale=0.25)  # type: ignore[operator]
        torch.autograd.grad(o.sum(), leaves)
        best = min(best, time.perf_counter() - start)
    return best


@pytest.mark.parametrize(("heads", "size"), [(4, 16), (16, 128)])
def test_chunks_are_ten_times_faster_than_the_recurrence(heads: int, size: int) -> None:
    inputs = kda_inputs(T=512, H=heads, K=size, V=size, dtype=torch.float32)
    chunks = min(best_time(kda_torch, inputs, 4), best_time(kda_torch, inputs, 4))
    tokens = best_time(kda_naive, inputs, 1)
    print(f"{heads} heads of {size}: chunks {chunks * 1e3:.1f} ms, recurrence {tokens * 1e3:.1f} ms")
    assert tokens >= 10 * chunks
