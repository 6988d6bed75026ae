"""The linear cross entropy: losses, gradients and memory, torch and Triton, against whole logits in fp64."""

import pytest
import torch
from torch import Tensor

from k3kernels.linear_cross_entropy import automatic_chunk, linear_cross_entropy
from tests.kernels.helpers import assert_close

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ["losses", "grad hidden", "grad weight"]


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)


def run(
    backend: str, dtype: torch.dtype, *, T: int = 23, V: int = 50, d: int = 12, chunk: int = 0, weighted: bool = False,
    ignored: int = 3, scale: float = 0.25,
) -> list[Tensor]:  # fmt: skip
    hidden = (2 * random(T, d, seed=0)).to(dtype).requires_grad_()
    weight = random(V, d, seed=1).to(dtype).requires_grad_()
    labels = torch.arange(T, device=DEVICE) * 7 % V
    labels[:ignored] = -100
    mask = (torch.arange(T, device=DEVICE) % 4 != 1).float() * (1 + torch.arange(T, device=DEVICE) % 3)
    options = {} if backend == "naive" else {"chunk": chunk, "token_weights": mask if weighted else None}
    losses = linear_cross_entropy(hidden, weight, labels, backend=backend, **options)  # type: ignore[arg-type]
    (losses * mask).sum().mul(scale).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [losses.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("weighted", [False, True], ids=["logits twice", "gradients with the losses"])
@pytest.mark.parametrize("chunk", [0, 1, 8, 23, 40], ids=lambda c: f"chunks of {c or 'automatic size'}")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_losses_and_gradients(monkeypatch: pytest.MonkeyPatch, backend: str, chunk: int, weighted: bool) -> None:
    monkeypatch.setattr("k3kernels.linear_cross_entropy.triton_softmax.BLOCK", 32)  # the last block of a row is cut
    expected = run("naive", torch.float64)
    if backend == "torch":
        assert_close(run(backend, torch.float64, chunk=chunk, weighted=weighted), expected, NAMES, 1e-13)
    assert_close(run(backend, torch.float32, chunk=chunk, weighted=weighted), expected, NAMES, 1e-6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_slices_of_the_vocabulary_make_up_the_whole(backend: str) -> None:
    if backend == "torch":
        from k3kernels.linear_cross_entropy.reference import gradient_torch as gradient
        from k3kernels.linear_cross_entropy.reference import statistics_torch as statistics
    else:
        from k3kernels.linear_cross_entropy.triton_softmax import gradient_triton as gradient
        from k3kernels.linear_cross_entropy.triton_softmax import statistics_triton as statistics
    logits, labels = 5 * random(6, 30, seed=0).float(), torch.tensor([0, 9, 10, 19, 20, 29], device=DEVICE)
    parts = [logits[:, first : first + 10].contiguous() for first in (0, 10, 20)]
    tops, sums, targets = zip(*(statistics(part, labels, 10 * i) for i, part in enumerate(parts)))
    top = torch.stack(tops).amax(0)
    lse = top + sum(s * (t - top).exp() for s, t in zip(sums, tops)).log()
    expected = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(expected, labels, reduction="none")
    weights = torch.linspace(0.5, 2, 6, device=DEVICE)
    losses.backward(weights.double())
    assert_close([lse - sum(targets)], [losses], ["losses"], 1e-6)
    for i, part in enumerate(parts):
        gradient(part, labels, lse, weights, 10 * i)
    assert_close([torch.cat(parts, 1)], [expected.grad], ["gradient"], 1e-6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_tokens_and_no_counted_tokens(backend: str) -> None:
    for T, ignored in ((0, 0), (3, 3)):
        for weighted in (False, True):
            losses, hidden, weight = run(backend, torch.float32, T=T, ignored=ignored, weighted=weighted)
            assert losses.shape == (T,) and not losses.any() and not hidden.any() and not weight.any()


def test_large_logits_stay_finite() -> None:
    hidden, weight = 1e4 * random(4, 8, seed=0).float(), random(16, 8, seed=1).float()
    labels = torch.arange(4, device=DEVICE)
    for backend in ("torch", "triton"):
        found = linear_cross_entropy(hidden, weight, labels, backend=backend)
        assert_close([found], [linear_cross_entropy(hidden, weight, labels, backend="naive")], ["losses"], 1e-6)


def test_weights_that_are_not_those_of_the_loss_are_refused() -> None:
    hidden, weight = random(6, 4, seed=0).float().requires_grad_(), random(9, 4, seed=1).float()
    losses = linear_cross_entropy(
        hidden, weight, torch.arange(6, device=DEVICE), token_weights=torch.ones(6, device=DEVICE), backend="torch"
    )
    loss = (losses * torch.arange(6, device=DEVICE)).sum()
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match=r"token_weights: the loss is not \(losses \* token_weights\)"):
            loss.backward()
    else:
        loss.backward()
        assert hidden.grad is not None and hidden.grad.isnan().all()


def test_gradients_found_with_the_losses_serve_one_backward() -> None:
    hidden, weight = random(6, 4, seed=0).float().requires_grad_(), random(9, 4, seed=1).float()
    ones = torch.ones(6, device=DEVICE)
    loss = linear_cross_entropy(hidden, weight, torch.arange(6, device=DEVICE), token_weights=ones).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="token_weights: their gradients serve one backward pass"):
        loss.backward()


def test_nothing_of_the_size_of_the_logits_is_ever_allocated() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    T, V, d, chunk = 64, 100, 8, 16
    seen: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            seen.extend(t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor))
            return out

    with Watch():
        run("torch", torch.float32, T=T, V=V, d=d, chunk=chunk)
        run("torch", torch.float32, T=T, V=V, d=d, chunk=chunk, weighted=True)
    assert max(seen) == chunk * V


def test_automatic_chunks() -> None:
    assert automatic_chunk(32768, 2) == 4096
    assert automatic_chunk(163840, 2) == 3200
    assert automatic_chunk(10**9, 2) == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(9, 5)}, r"weight: expected shape \[V, d\] = \[any, 4\]"),
        ({"weight": torch.zeros(9, 4).bfloat16()}, "weight: expected torch.float32 like hidden"),
        ({"labels": torch.zeros(6)}, r"labels: expected int64 \[T\] = \[6\], got torch.float32"),
        ({"token_weights": torch.ones(5)}, "token_weights: expected shape"),
        ({"chunk": -1}, "chunk: expected a number of tokens"),
        ({"backend": "cuda"}, "backend: expected one of"),
    ],
    ids=["wide weight", "other dtype", "float labels", "few weights", "negative chunk", "unknown backend"],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments = {"hidden": torch.zeros(6, 4), "weight": torch.zeros(9, 4), "labels": torch.zeros(6, dtype=torch.int64)}
    with pytest.raises((ValueError, TypeError), match=message):
        linear_cross_entropy(**{**arguments, **change})  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs one CUDA device")
class TestOnDevice:
    @pytest.mark.parametrize("weighted", [False, True], ids=["logits twice", "gradients with the losses"])
    def test_real_size(self, weighted: bool) -> None:
        size = {"T": 3000, "V": 20000, "d": 512, "scale": 1.0}
        expected = run("naive", torch.float64, **size)  # type: ignore[arg-type]
        found = run("auto", torch.float32, weighted=weighted, chunk=1024, **size)  # type: ignore[arg-type]
        assert_close(found, expected, NAMES, 1e-5)
        exact = run("naive", torch.bfloat16, **size)  # type: ignore[arg-type]
        found = run("auto", torch.bfloat16, weighted=weighted, chunk=1024, **size)  # type: ignore[arg-type]
        assert_close(found, exact, NAMES, 2e-2)
        again = run("auto", torch.bfloat16, weighted=weighted, chunk=1024, **size)  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(found, again))

    def test_peak_memory_is_that_of_a_chunk(self) -> None:
        T, V, d, chunk = 16384, 65536, 256, 1024
        hidden = torch.randn(T, d, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        weight = torch.randn(V, d, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        labels, ones = torch.randint(V, (T,), device=DEVICE), torch.ones(T, device=DEVICE)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(hidden, weight, labels, token_weights=ones, chunk=chunk).sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        # a chunk of logits, the weight's gradient in fp32 and in bf16, the gradient of hidden
        assert peak < 1.1 * (2 * chunk * V + 6 * V * d + 2 * T * d) + 2**20 < 0.2 * (2 * T * V)
