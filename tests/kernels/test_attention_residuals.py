"""Attention residuals: one mix and a block of them, torch and Triton, against autograd of the formula in fp64.

Without a GPU the Triton kernels run under the interpreter (small sizes); with one they are compiled.
"""

import pytest
import torch
from torch import Tensor

from k3kernels.attention_residuals import DepthBlock, attention_residual, first_phase_pays, ops
from tests.kernels.helpers import assert_close, relative_error

triton = pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def one_mix(n: int, T: int, d: int, dtype: torch.dtype, backend: str, normed: bool) -> list[Tensor]:
    """Output and gradients of sources, query, norm weight and output weight."""
    sources = [random(T, d, seed=i) * (1 + i) for i in range(n)]
    vectors = [random(d, seed=50) * 0.4, 1 + 0.2 * random(d, seed=51)] + [1 + 0.3 * random(d, seed=52)] * normed
    leaves = [x.to(dtype).requires_grad_() for x in (*sources, *vectors)]
    *given, query, norm = leaves[: n + 2]
    y = attention_residual(given, query, norm, output_weight=leaves[-1] if normed else None, backend=backend)
    loss = (y * random(T, d, seed=60).to(dtype)).sum()
    return [y, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("normed", [False, True], ids=["mix", "mix and norm"])
@pytest.mark.parametrize(
    ("n", "T", "d"), [(1, 3, 16), (2, 5, 24), (5, 4, 40), (9, 3, 8), (3, 0, 8)],
    ids=["one source", "two sources", "five sources", "nine sources", "no tokens"],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_mix_and_its_gradients(backend: str, n: int, T: int, d: int, normed: bool) -> None:
    expected = one_mix(n, T, d, torch.float64, "naive", normed)
    names = ["y", *(f"source {j}" for j in range(n)), "query", "norm", "output weight"][: len(expected)]
    if backend == "torch":
        assert_close(one_mix(n, T, d, torch.float64, "torch", normed), expected, names, 1e-12)
    found = one_mix(n, T, d, torch.float32, backend, normed)
    if n == 1:  # the weights are constant: the true gradients of query and norm are zero
        assert all(float(g.abs().max()) < 1e-4 for g in (found[2], found[3]))
        keep = [0, 1, *range(4, len(found))]
        found, expected, names = ([x[i] for i in keep] for x in (found, expected, names))  # type: ignore[assignment]
    assert_close(found, expected, names, 2e-5)


def a_network(
    dtype: torch.dtype, backend: str, *, prepare: bool = False, T: int = 5, d: int = 24, mixes: tuple[int, ...] = (2, 5, 3)
) -> list[Tensor]:  # fmt: skip
    """A stack with as many blocks of mixes, each output passing a nonlinear sublayer into the running sum.

    Returns the output of a last mix and the gradients of the input, of all queries, norms and output weights.
    """
    x = random(T, d, seed=0).to(dtype).requires_grad_()
    total = sum(mixes) + 1
    queries = [(0.4 * random(d, seed=100 + i)).to(dtype).requires_grad_() for i in range(total)]
    norms = [(1 + 0.2 * random(d, seed=200 + i)).to(dtype).requires_grad_() for i in range(total)]
    outs = [(1 + 0.2 * random(d, seed=300 + i)).to(dtype).requires_grad_() for i in range(total)]
    bank: tuple[Tensor, ...] = (x,)
    i = 0
    block = None
    for size in mixes:
        block = DepthBlock(bank, backend=backend)
        if prepare:
            block.prepare(queries[i + 1 : i + size], norms[i + 1 : i + size])
        partial = None
        for _ in range(size):
            y, passed = block.mix(partial, queries[i], norms[i], output_weight=outs[i])
            y = torch.tanh(y) * (1 + i % 3)
            partial = y if passed is None else passed + y
            i += 1
        bank = (*block.sources, partial)
    y = attention_residual(bank, queries[i], norms[i], output_weight=outs[i], backend=backend)
    leaves = [x, *queries[1:], *norms[1:], *outs]  # the first mix has one source: its query does not act
    return [y, *torch.autograd.grad((y * random(T, d, seed=1).to(dtype)).sum(), leaves)]


@pytest.mark.parametrize(
    ("backend", "group", "prepare"), [("torch", 8, False), ("triton", 8, False), ("triton", 2, False), ("triton", 8, True)],
    ids=["torch", "triton", "triton, two mixes a pass", "triton, two phases"],
)  # fmt: skip
def test_blocks_of_mixes_collect_the_gradients_that_autograd_would(
    monkeypatch: pytest.MonkeyPatch, backend: str, group: int, prepare: bool
) -> None:
    monkeypatch.setattr(ops, "GROUP", group)
    expected = a_network(torch.float64, "naive")
    names = [f"value {i}" for i in range(len(expected))]
    if backend == "torch":
        assert_close(a_network(torch.float64, "torch"), expected, names, 1e-12)
    found = a_network(torch.float32, backend, prepare=prepare)
    assert_close(found, expected, names, 2e-5)
    assert all(torch.equal(a, b) for a, b in zip(found, a_network(torch.float32, backend, prepare=prepare)))


def test_two_phases_give_what_one_gives() -> None:
    one, two = a_network(torch.float32, "triton"), a_network(torch.float32, "triton", prepare=True)
    if DEVICE == "cpu":
        assert all(torch.equal(a, b) for a, b in zip(one, two))
    else:  # a compiler may contract the two kernels' sums differently
        assert_close(two, one, [f"value {i}" for i in range(len(one))], 1e-5)


def test_a_block_keeps_its_inputs_and_few_numbers_a_token() -> None:
    sources = [random(6, 32, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)]
    partial = random(6, 32, seed=9, dtype=torch.float32).requires_grad_()
    vectors = [random(32, seed=20 + i, dtype=torch.float32).requires_grad_() for i in range(3)]
    known = {t.untyped_storage().data_ptr() for t in (*sources, partial, *vectors)}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in known:
            kept[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        block = DepthBlock(sources, backend="triton")
        for _ in range(4):
            x, partial = block.mix(partial, vectors[0], vectors[1], output_weight=vectors[2])  # type: ignore[assignment]
    scores, denominators = 6 * (3 + 1) * 2, 6
    assert sorted(kept.values()) == [denominators] * 4 + [scores] * 4


def test_a_mix_can_be_taken_without_gradients_and_without_those_of_the_sources() -> None:
    sources = [random(4, 16, seed=i, dtype=torch.float32) for i in range(2)]
    query, norm = (random(16, seed=5 + i, dtype=torch.float32).requires_grad_() for i in range(2))
    y = attention_residual(sources, query, norm, backend="triton")
    grads = torch.autograd.grad(y.square().sum(), [query, norm])
    reference = attention_residual(sources, query, norm, backend="naive")
    assert_close(grads, torch.autograd.grad(reference.square().sum(), [query, norm]), ["query", "norm"], 2e-5)
    with torch.no_grad():
        assert relative_error(attention_residual(sources, query, norm, backend="triton"), reference) < 2e-6


def test_two_phases_pay_for_long_banks_alone() -> None:
    assert not first_phase_pays(4, 8)
    assert first_phase_pays(6, 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": []}, "sources: expected at least one"),
        ({"sources": [torch.zeros(2, 8), torch.zeros(3, 8)]}, r"sources\[1\]: expected shape"),
        ({"sources": [torch.zeros(2, 8), torch.zeros(2, 8).bfloat16()]}, r"sources\[1\]: expected torch.float32"),
        ({"query": torch.zeros(7)}, "query: expected shape"),
        ({"eps": 0.0}, "eps: expected a positive number, got 0.0"),
        ({"backend": "cuda"}, "backend: expected one of"),
        ({"sources": [torch.zeros(1, 8)] * 40, "backend": "triton"}, "sources: Triton takes fewer than 32, got 40"),
    ],
    ids=["no sources", "other shape", "other dtype", "short query", "zero eps", "unknown backend", "too many sources"],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "sources": [torch.zeros(2, 8)] * 2,
        "query": torch.zeros(8),
        "norm_weight": torch.ones(8),
    }
    arguments |= change
    with pytest.raises((ValueError, TypeError), match=message):
        attention_residual(arguments.pop("sources"), **arguments)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs one CUDA device")
class TestOnDevice:
    @pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 2e-5), (torch.bfloat16, 1.5e-2)], ids=["fp32", "bf16"])
    @pytest.mark.parametrize(("n", "d"), [(2, 1792), (5, 1792), (3, 100), (6, 128), (9, 7168)])
    def test_a_mix_of_real_size(self, n: int, dtype: torch.dtype, tol: float, d: int) -> None:
        def run(kind: torch.dtype, backend: str) -> list[Tensor]:
            sources = [random(1111, d, seed=i, dtype=dtype).to(kind).requires_grad_() for i in range(n)]
            query = (random(d, seed=50) * 2 / d**0.5).to(dtype).to(kind).requires_grad_()
            weights = [(1 + 0.1 * random(d, seed=51 + i)).to(dtype).to(kind).requires_grad_() for i in range(2)]
            y = attention_residual(sources, query, weights[0], output_weight=weights[1], backend=backend)
            loss = (y * random(1111, d, seed=60, dtype=dtype).to(kind)).sum()
            return [y, *torch.autograd.grad(loss, [*sources, query, *weights])]

        expected = run(torch.float64, "naive")
        assert_close(run(dtype, "triton"), expected, [f"value {i}" for i in range(len(expected))], tol)

    @pytest.mark.parametrize("prepare", [False, True], ids=["one phase", "two phases"])
    def test_runs_are_bitwise_equal(self, prepare: bool) -> None:
        def run() -> list[Tensor]:
            return a_network(torch.bfloat16, "triton", prepare=prepare, T=3000, d=1792, mixes=(2, 8, 20))

        first = run()
        for _ in range(10):
            assert all(torch.equal(a, b) for a, b in zip(first, run()))
