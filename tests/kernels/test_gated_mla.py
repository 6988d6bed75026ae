"""Keys, values and the gate of Gated MLA on Triton against torch (interpreted without a GPU, compiled with one)."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from k3kernels.gated_mla import assemble_keys, sigmoid_gate
from k3kernels.peaks import PEAKS
from tests.kernels.helpers import assert_close, relative_error

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SIZES = pytest.mark.parametrize(
    "sizes",
    [(3, 2, 128, 64, 128), (7, 3, 6, 10, 12), (5, 1, 8, 4, 16), (2, 35, 16, 8, 8), (0, 2, 8, 4, 8)],
    ids=["K3's channels", "channels that are no powers of two", "one head", "more heads than a tile", "no tokens"],
)  # T, H, nope_dim, s, v


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).bfloat16().double().to(DEVICE)


def assert_rounded_once(got: Tensor, exact: Tensor, name: str) -> None:
    """No further from the fp64 result than that result in got's dtype."""
    once = exact.to(got.dtype)
    if DEVICE == "cpu" and got.dtype == torch.bfloat16:  # the interpreter cuts bfloat16 off instead of rounding it
        once = (exact.float().view(torch.int32) & ~0xFFFF).view(torch.float32)
    allowed, error = 1.01 * relative_error(once, exact) + 1e-6, relative_error(got, exact)
    assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"


@pytest.fixture
def peaks() -> Iterator[None]:
    PEAKS.wanted = True
    yield
    PEAKS.wanted = False
    PEAKS.forget()


def noted(tensor: Tensor) -> float | None:
    slots = PEAKS.take(tensor)
    return None if slots is None else float(slots.max())


class Keys:
    """One call and its gradients: shared is a slice of wider rows; dk and dv as given, None where nobody sent one."""

    def __init__(
        self, sizes: tuple[int, ...], dtype: torch.dtype, backend: str, dk: Tensor | None, dv: Tensor | None
    ) -> None:
        T, H, N, S, V = sizes
        self.kv = normal(T, H, N + V, seed=0).to(dtype).requires_grad_()
        self.latent = normal(T, 5 + S, seed=1).to(dtype).requires_grad_()
        self.k, self.v = assemble_keys(self.kv, self.latent[:, 5:], N, backend=backend)
        sent = [(x, g.to(dtype)) for x, g in ((self.k, dk), (self.v, dv)) if g is not None]
        outputs, gradients = zip(*sent)
        self.dkv, self.dlatent = torch.autograd.grad(
            outputs, (self.kv, self.latent), gradients, allow_unused=True, materialize_grads=True
        )

    @property
    def copied(self) -> list[Tensor]:
        return [self.k, self.v, self.dkv]


def gradients(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    T, H, N, S, V = sizes
    return normal(T, H, N + S, seed=2), normal(T, H, V, seed=3)


@DTYPES
@SIZES
@pytest.mark.parametrize("sent", ["both", "keys", "values"])
def test_keys_are_what_torch_makes(sizes: tuple[int, ...], dtype: torch.dtype, sent: str) -> None:
    dk, dv = gradients(sizes)
    given = (None if sent == "values" else dk, None if sent == "keys" else dv)
    found = Keys(sizes, dtype, "triton", *given)
    expected = Keys(sizes, torch.float64, "torch", *given)
    assert all(torch.equal(a.double(), b) for a, b in zip(found.copied, expected.copied))
    assert found.k.is_contiguous() and found.v.is_contiguous() and found.v.storage_offset() == 0
    assert_rounded_once(found.dlatent, expected.dlatent, "dlatent")


@pytest.mark.parametrize(
    "strided",
    [
        lambda T, H, width: normal(H, T, width, seed=width).transpose(0, 1),
        lambda T, H, width: normal(T, 1, width, seed=width).expand(-1, H, -1),
        lambda T, H, width: normal(T, width, H, seed=width).transpose(1, 2),
    ],
    ids=["heads before tokens", "one for all heads", "channels before heads"],
)
def test_gradients_of_keys_may_be_strided(strided: Callable[[int, int, int], Tensor]) -> None:
    sizes = T, H, N, S, V = 5, 3, 8, 4, 16
    given = strided(T, H, N + S), strided(T, H, V)
    found, expected = Keys(sizes, torch.float32, "triton", *given), Keys(sizes, torch.float64, "torch", *given)
    assert torch.equal(found.dkv.double(), expected.dkv)
    assert_close([found.dlatent], [expected.dlatent], ["dlatent"], 1e-6)


class Gate:
    """One call of the gate and its gradients."""

    def __init__(self, shape: tuple[int, ...], of_o: torch.dtype, dtype: torch.dtype, backend: str) -> None:
        self.o = normal(*shape, seed=0).to(of_o).requires_grad_()
        self.gate = (4 * normal(*shape, seed=1)).to(dtype).requires_grad_()
        self.y = sigmoid_gate(self.o, self.gate, backend=backend)
        self.do, self.dgate = torch.autograd.grad(self.y, (self.o, self.gate), normal(*shape, seed=2).to(dtype))

    @property
    def all(self) -> list[Tensor]:
        return [self.y, self.do, self.dgate]


@pytest.mark.parametrize(
    ("of_o", "dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
    ids=["fp32", "bf16", "fp32 output and bf16 gate"],
)
@pytest.mark.parametrize("shape", [(3, 256), (7, 5), (2, 3, 1500), (0, 8)], ids=str)
def test_gate_is_rounded_once(shape: tuple[int, ...], of_o: torch.dtype, dtype: torch.dtype) -> None:
    found, exact = Gate(shape, of_o, dtype, "triton"), Gate(shape, torch.float64, torch.float64, "torch")
    for name, got, want in zip(("y", "do", "dgate"), found.all, exact.all):
        assert got.dtype == (of_o if name == "do" else dtype)
        assert_rounded_once(got, want, name)


def test_gate_in_torch_is_the_formula() -> None:
    o, gate = normal(9, 8, seed=0).float(), normal(9, 8, seed=1).bfloat16()
    got = sigmoid_gate(o, gate, backend="torch")
    assert got.dtype == torch.bfloat16 and torch.equal(got, (o * torch.sigmoid(gate)).to(torch.bfloat16))


def test_only_the_inputs_of_the_gate_are_kept_and_nothing_of_keys() -> None:
    kept: list[Tensor] = []
    o, gate = (normal(4, 8, seed=i).float().requires_grad_() for i in (0, 1))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        assemble_keys(normal(4, 2, 12, seed=2).requires_grad_(), normal(4, 3, seed=3), 5, backend="triton")
        assert kept == []
        sigmoid_gate(o, gate, backend="triton")
    assert [t.data_ptr() for t in kept] == [o.data_ptr(), gate.data_ptr()]


@DTYPES
@SIZES
@pytest.mark.parametrize("sent", ["both", "keys", "values"])
def test_peak_of_the_gradient_of_keys(sizes: tuple[int, ...], dtype: torch.dtype, sent: str, peaks: None) -> None:
    dk, dv = (1.2345678 * g for g in gradients(sizes))  # not yet rounded
    found = Keys(sizes, dtype, "triton", None if sent == "values" else dk, None if sent == "keys" else dv)
    assert noted(found.dkv.flatten(1)) == (float(found.dkv.abs().max()) if sizes[0] else 0.0)
    assert noted(found.k) is None and noted(found.v) is None


@DTYPES
@pytest.mark.parametrize("shape", [(7, 5), (33, 512)], ids=["part of a program", "several programs"])
def test_peaks_of_the_gate(shape: tuple[int, ...], dtype: torch.dtype, peaks: None) -> None:
    found = Gate(shape, dtype, dtype, "triton")
    assert noted(found.do) is None
    assert noted(found.y) == float(found.y.detach().abs().max())
    assert noted(found.dgate) == float(found.dgate.abs().max())


def test_no_peak_is_noted_where_none_is_wanted_and_no_bit_depends_on_it(peaks: None) -> None:
    def run() -> tuple[list[Tensor], list[Tensor]]:
        keys = Keys((3, 2, 8, 4, 8), torch.bfloat16, "triton", *gradients((3, 2, 8, 4, 8)))
        gate = Gate((4, 8), torch.bfloat16, torch.bfloat16, "triton")
        return [keys.dkv, gate.y, gate.dgate], [keys.dlatent, gate.do]

    with_peaks, others = run()
    PEAKS.wanted = False
    PEAKS.forget()
    plain, plain_others = run()
    assert [noted(x) for x in plain] == [None, None, None]
    assert all(torch.equal(a, b) for a, b in zip([*plain, *plain_others], [*with_peaks, *others]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shared": torch.zeros(3, 4)}, "shared: expected shape"),
        ({"shared": torch.zeros(2, 4).bfloat16()}, "shared: expected torch.float32 like kv"),
        ({"nope_dim": 8}, "nope_dim: expected more than 0 and less than kv's 8 channels, got 8"),
        ({"backend": "naive"}, "backend: expected one of auto, torch, triton"),
    ],
    ids=["other tokens", "other dtype", "no values", "unknown backend"],
)
def test_bad_arguments_of_keys_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        assemble_keys(**{"kv": torch.zeros(2, 3, 8), "shared": torch.zeros(2, 4), "nope_dim": 4, **change})  # type: ignore[arg-type]


def test_a_gate_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="gate: expected shape"):
        sigmoid_gate(torch.zeros(2, 4), torch.zeros(2, 5))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs one CUDA device")
@DTYPES
def test_real_size_and_bits(dtype: torch.dtype, peaks: None) -> None:
    sizes = (4099, 24, 128, 64, 128)
    given = gradients(sizes)
    keys, exact = Keys(sizes, dtype, "auto", *given), Keys(sizes, torch.float64, "torch", *given)
    assert all(torch.equal(a.double(), b) for a, b in zip(keys.copied, exact.copied))
    assert_close([keys.dlatent], [exact.dlatent], ["dlatent"], 3e-3 if dtype == torch.bfloat16 else 1e-6)
    gate, of_gate = Gate((4099, 3072), dtype, dtype, "auto"), Gate((4099, 3072), torch.float64, torch.float64, "torch")
    assert_close(gate.all, of_gate.all, ["y", "do", "dgate"], 3e-3 if dtype == torch.bfloat16 else 1e-6)
    for tensor in (keys.dkv, gate.y, gate.dgate):
        assert noted(tensor) == float(tensor.detach().abs().max())
    for _ in range(5):
        again, gate_again = Keys(sizes, dtype, "auto", *given), Gate((4099, 3072), dtype, dtype, "auto")
        assert all(torch.equal(a, b) for a, b in zip([*keys.copied, keys.dlatent], [*again.copied, again.dlatent]))
        assert all(torch.equal(a, b) for a, b in zip(gate.all, gate_again.all))
