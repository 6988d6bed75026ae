"""Peaks of tensors: what kernels note is the largest magnitude as stored, and the book gives it for those numbers only.

Without a GPU the kernels run under Triton's interpreter; with one the same tests run the compiled kernels.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from k3kernels.attention_residuals import DepthBlock, attention_residual
from k3kernels.conv import short_convolution, short_convolution_qkv
from k3kernels.norm import gated_rms_norm
from k3kernels.peaks import HELD, PEAKS, SLOTS, peak_scale
from k3kernels.situ import situ_glu, situ_glu_packed

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
Run = Callable[[], tuple[list[Tensor], list[Tensor]]]
"""Computes -> tensors whose peaks are to be noted, and others."""


@pytest.fixture(autouse=True)
def wanted() -> Iterator[None]:
    PEAKS.wanted = True
    PEAKS.forget()
    yield
    PEAKS.wanted = False
    PEAKS.forget()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def noted(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor as a kernel would leave it: peak and note."""
    slots = PEAKS.slots(tensor.device)
    assert slots is not None
    slots[3] = tensor.abs().max().float()
    PEAKS.note(tensor, slots)
    return tensor


def peak_of(tensor: Tensor) -> float | None:
    slots = PEAKS.take(tensor)
    return None if slots is None else float(slots.max())


def check(run: Run) -> None:
    """Peaks are exact, other tensors have none, and without peaks every bit is the same."""
    with_peaks, others = run()
    for i, tensor in enumerate(with_peaks):
        assert peak_of(tensor) == float(tensor.abs().max()), i
        slots = PEAKS.take(tensor)
        assert slots is not None and slots.shape == (SLOTS,) and slots.is_contiguous()
    assert all(peak_of(tensor) is None for tensor in others)
    PEAKS.wanted = False
    PEAKS.forget()
    plain = [t for kind in run() for t in kind]
    assert all(torch.equal(a, b) for a, b in zip((*with_peaks, *others), plain, strict=True))
    assert all(peak_of(tensor) is None for tensor in plain)


class _Noting(torch.autograd.Function):
    """x twice, its gradient noted; `given` records the gradients that arrive."""

    @staticmethod
    def forward(ctx, x, given):  # type: ignore[no-untyped-def]
        ctx.given = given
        return x * 2

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.given.append((grad, peak_of(grad), float(grad.abs().max())))
        return noted(grad * 2), None


# Kernels that find peaks.


@DTYPES
@pytest.mark.parametrize(
    ("T", "widths", "W", "cu_seqlens"),
    [
        (37, (6, 6, 300), 4, None), (37, (5, 12, 3), 4, [0, 15, 17, 37]), (1, (3, 3, 3), 4, None), (20, (8, 8, 8), 2, [0, 0, 1, 20]),
        (18, (1, 1, 1), 4, None),
    ],
    ids=["one document", "documents", "one token", "two taps", "one channel"],
)  # fmt: skip
def test_gradients_of_the_three_convolutions(
    monkeypatch: pytest.MonkeyPatch, T: int, widths: tuple[int, ...], W: int, cu_seqlens: list[int] | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    if DEVICE == "cpu":
        monkeypatch.setattr("k3kernels.conv.triton_conv.ROWS", 16)  # the interpreter pays for every row of a block
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)

    def run() -> tuple[list[Tensor], list[Tensor]]:
        xs = [random(1, T, C, seed=i, dtype=dtype).requires_grad_() for i, C in enumerate(widths)]
        weights = [random(C, W, seed=9).requires_grad_() for C in widths]
        *ys, _ = short_convolution_qkv(*xs, *weights, cu_seqlens=bounds, backend="triton")
        # the largest gradient enters by the first row of a block, whose taps reach back into the one before
        rows = 1 + 9 * (torch.arange(T, device=DEVICE) == 16)[:, None]
        given = [(random(*y.shape, seed=4) * rows).to(dtype) for y in ys]
        found = list(torch.autograd.grad(ys, [*xs, *weights], given))
        return found[:3], [*ys, *found[3:]]

    check(run)


def test_one_convolution_of_a_batch() -> None:
    x, weight = random(3, 21, 10).requires_grad_(), random(10, 4)
    y, _ = short_convolution(x, weight, backend="triton")
    (dx,) = torch.autograd.grad(y.square().sum(), [x])
    assert peak_of(dx) == float(dx.abs().max())


@DTYPES
@pytest.mark.parametrize("packed", [False, True], ids=["two tensors", "one product's output"])
@pytest.mark.parametrize(("N", "h"), [(7, 5), (3, 40), (2, 1030), (0, 8)], ids=str)
def test_the_gated_unit_and_its_gradients(N: int, h: int, packed: bool, dtype: torch.dtype) -> None:
    def run() -> tuple[list[Tensor], list[Tensor]]:
        x = random(N, 2 * h, dtype=dtype).requires_grad_()
        gate, up = (t.detach().requires_grad_() for t in x.chunk(2, -1))
        dy = random(N, h, seed=1, dtype=dtype)
        if packed:
            y = situ_glu_packed(x, beta=4.0, linear_beta=25.0, backend="triton")
            return [y], [*torch.autograd.grad(y, [x], dy)]
        y = situ_glu(gate, up, beta=4.0, linear_beta=25.0, backend="triton")
        return [y, *torch.autograd.grad(y, [gate, up], dy)], []

    if N:
        check(run)
    else:
        (y, *_), _ = run()
        assert peak_of(y) == 0.0


def test_units_with_scaled_rows_leave_the_book_to_others() -> None:
    x, scale = random(6, 16).requires_grad_(), random(6).requires_grad_()
    y = situ_glu(x[:, :8], x[:, 8:], beta=4.0, linear_beta=25.0, scale=scale, backend="triton")
    found = torch.autograd.grad(y.sum(), [x, scale])
    assert all(peak_of(t) is None for t in (y, *found))


@DTYPES
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 4, 32), (9, 5), (3000, 4)], ids=str)
def test_the_gated_norm_and_the_gradient_of_its_gate(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def run() -> tuple[list[Tensor], list[Tensor]]:
        leaves = [random(*shape, dtype=dtype), random(*shape, seed=1, dtype=dtype), random(shape[-1], seed=2)]
        leaves = [x.requires_grad_() for x in leaves]
        y = gated_rms_norm(*leaves, backend="triton")
        do, dgate, dweight = torch.autograd.grad(y, leaves, random(*shape, seed=3, dtype=dtype))
        return [y, dgate], [do, dweight]

    check(run)


@DTYPES
@pytest.mark.parametrize("later", [False, True], ids=["last mix", "mixes behind it"])
@pytest.mark.parametrize(("n", "T", "d"), [(1, 3, 16), (2, 5, 24), (5, 4, 33)], ids=str)
def test_a_normed_mix_and_the_gradient_of_the_running_sum(
    n: int, T: int, d: int, later: bool, dtype: torch.dtype
) -> None:
    def run() -> tuple[list[Tensor], list[Tensor]]:
        sources = [random(T, d, seed=i, dtype=dtype).requires_grad_() for i in range(n)]
        partial = random(T, d, seed=20, dtype=dtype).requires_grad_()
        query, norm, out = (random(d, seed=30 + i, dtype=dtype).requires_grad_() for i in range(3))
        block = DepthBlock(sources, backend="triton")
        x, passed = block.mix(partial, query, norm, output_weight=out)
        assert passed is not None
        ends = [(x, random(T, d, seed=40, dtype=dtype)), (passed, random(T, d, seed=41, dtype=dtype))][: 1 + later]
        ys, given = zip(*ends)
        found = list(torch.autograd.grad(ys, [partial, *sources, query, norm, out], given))
        return [x, found[0]], found[1:]

    check(run)


def test_a_mix_that_no_product_reads_has_no_peak() -> None:
    sources = [random(4, 8, seed=i).requires_grad_() for i in range(2)]
    x = attention_residual(sources, random(8, seed=3), random(8, seed=4), backend="triton")
    assert peak_of(x) is None


def test_both_products_in_front_of_a_sum_find_the_peak_of_its_gradient() -> None:
    """As a KDA layer's o_proj does, and the shared and routed experts' last products."""
    given: list[tuple[Tensor, float | None, float]] = []
    x = random(6, 24).requires_grad_()
    first, second, query, norm, out = (random(6, 24, seed=i).requires_grad_() for i in range(1, 6))
    block = DepthBlock([x], backend="triton")
    passed = None
    for made in (first, second):
        sublayer = _Noting.apply(made, given) + _Noting.apply(made * 3, given)
        partial = sublayer if passed is None else passed + sublayer
        y, passed = block.mix(partial, query[0], norm[0], output_weight=out[0])
    y.square().sum().backward()
    assert len(given) == 4
    assert all(peak == largest for _, peak, largest in given)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs one CUDA device")
@DTYPES
class TestOnDevice:
    def test_convolutions_of_real_size(self, dtype: torch.dtype) -> None:
        bounds = torch.tensor([0, 1, 2049, 2049, 9001], dtype=torch.int32, device=DEVICE)
        weights = [random(3072, 4, seed=i).requires_grad_() for i in range(3)]

        def run() -> tuple[list[Tensor], list[Tensor]]:
            xs = [random(1, 9001, 3072, seed=i, dtype=dtype).requires_grad_() for i in range(3)]
            *ys, _ = short_convolution_qkv(*xs, *weights, cu_seqlens=bounds)
            found = torch.autograd.grad(ys, [*xs, *weights], [random(*y.shape, seed=4, dtype=dtype) for y in ys])
            return list(found[:3]), [*ys, *found[3:]]

        check(run)

    @pytest.mark.parametrize("width", [1536, 3072], ids=str)
    def test_units_of_real_size(self, width: int, dtype: torch.dtype) -> None:
        def run() -> tuple[list[Tensor], list[Tensor]]:
            gate, up, dy = (random(9001, width, seed=i, dtype=dtype).requires_grad_() for i in range(3))
            y = situ_glu(gate, up, beta=4.0, linear_beta=25.0)
            return [y, *torch.autograd.grad(y, [gate, up], dy)], []

        check(run)

    def test_norms_of_real_size(self, dtype: torch.dtype) -> None:
        def run() -> tuple[list[Tensor], list[Tensor]]:
            o, gate, dy = (random(9001, 24, 128, seed=i, dtype=dtype).requires_grad_() for i in range(3))
            weight = random(128).requires_grad_()
            y = gated_rms_norm(o, gate, weight)
            do, dgate, dweight = torch.autograd.grad(y, [o, gate, weight], dy)
            return [y, dgate], [do, dweight]

        check(run)

    @pytest.mark.parametrize("prepare", [False, True], ids=["one phase", "two phases"])
    def test_mixes_of_real_size(self, prepare: bool, dtype: torch.dtype) -> None:
        def run() -> tuple[list[Tensor], list[Tensor]]:
            sources = [random(9001, 1792, seed=i, dtype=dtype).requires_grad_() for i in range(4)]
            partial = random(9001, 1792, seed=20, dtype=dtype).requires_grad_()
            query, norm, out = (random(1792, seed=30 + i, dtype=dtype).requires_grad_() for i in range(3))
            block = DepthBlock(sources)
            if prepare:
                block.prepare([query], [norm])
            x, _ = block.mix(partial, query, norm, output_weight=out)
            dx = random(9001, 1792, seed=40, dtype=dtype)
            found = list(torch.autograd.grad(x, [partial, *sources, query, norm, out], dx))
            return [x, found[0]], found[1:]

        check(run)


# The book.


def test_a_note_is_found_through_views_of_the_whole() -> None:
    x = noted(random(1, 6, 8))
    for view in (x, x[0], x.view(-1), x.view(6, 2, 4), x.detach(), x.squeeze(0).unsqueeze(1)):
        assert peak_of(view) == float(x.abs().max())


def test_a_part_another_order_or_another_type_is_not_found() -> None:
    x = noted(random(6, 8))
    for other in (x[1:], x[:3], x[:, :4], x.T, x.view(torch.int32), x.clone()):
        assert peak_of(other) is None
    whole = random(4, 8)
    noted(whole[2:])
    assert peak_of(whole) is None
    assert peak_of(whole[2:]) is not None


@pytest.mark.parametrize("through", [lambda x: x, lambda x: x.view(-1)[3:5]], ids=["whole", "a view"])
def test_what_was_written_in_place_is_not_found(through: Callable[[Tensor], Tensor]) -> None:
    x = noted(random(6, 8))
    through(x).mul_(2)
    assert peak_of(x) is None
    noted(x)
    assert peak_of(x) == float(x.abs().max())


def test_a_note_keeps_no_memory_and_other_tensors_in_its_place_are_not_found() -> None:
    x = noted(random(64, 64))
    address, storage = x.data_ptr(), x.untyped_storage()._cdata
    del x
    again = [torch.empty(64, 64, device=DEVICE) for _ in range(50)]  # one of them most likely lies there
    assert all(peak_of(t) is None for t in again)
    assert all(t.untyped_storage()._cdata != storage for t in again)  # what a note names is not given away
    if DEVICE == "cuda":
        assert any(t.data_ptr() == address for t in again)


def test_memory_that_was_given_back_is_not_found() -> None:
    x = noted(random(64, 64))
    address, size = x.data_ptr(), x.untyped_storage().size()
    x.untyped_storage().resize_(0)
    others = [torch.empty(64, 64, device=DEVICE) for _ in range(50)]  # one of them most likely lies there
    assert all(peak_of(t) is None for t in (x, *others))
    x.untyped_storage().resize_(size)
    assert x.data_ptr() == address or peak_of(x) is None


def test_the_oldest_notes_are_forgotten() -> None:
    xs = [noted(random(2, 3, seed=i)) for i in range(HELD + 2)]
    assert [peak_of(x) is not None for x in xs] == [False] * 2 + [True] * HELD
    PEAKS.forget()
    assert all(peak_of(x) is None for x in xs)


def test_nothing_is_noted_without_peaks_nor_of_tensors_that_keep_no_count_of_changes() -> None:
    with torch.inference_mode():
        untold = noted(random(2, 3))
    assert peak_of(untold) is None
    PEAKS.wanted = False
    assert PEAKS.slots(torch.device(DEVICE)) is None
    PEAKS.note(untold, None)
    PEAKS.note_each([untold], None)


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_a_gradient_summed_by_autograd_has_no_peak_but_that_of_the_sum(readers: int) -> None:
    given: list[tuple[Tensor, float | None, float]] = []
    x = random(5, 4).requires_grad_()
    middle = _Noting.apply(x, given)
    sum(_Noting.apply(middle, given) * (1 + i) for i in range(readers)).sum().backward()  # type: ignore[attr-defined]
    _, peak, largest = given[-1]  # at the first of them: the sum over its readers, which autograd may make in place
    assert len(given) == readers + 1
    assert peak == (largest if readers == 1 else None)
    assert largest == 2.0 * sum(1 + i for i in range(readers))


def test_a_gradient_that_two_readers_share_is_found_by_both() -> None:
    given: list[tuple[Tensor, float | None, float]] = []
    x, y = (random(5, 4, seed=i).requires_grad_() for i in range(2))
    _Noting.apply(_Noting.apply(x, given) + _Noting.apply(y, given), []).sum().backward()  # type: ignore[no-untyped-call]
    assert [(peak, largest) for _, peak, largest in given] == [(2.0, 2.0)] * 2


def test_a_gradient_kept_by_a_leaf_and_added_to_is_not_found() -> None:
    x = random(5, 4).requires_grad_()
    for turn in range(2):
        _Noting.apply(x, []).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert peak_of(x.grad) == (2.0 if turn == 0 else None)


# The scale.


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["any", "power of two"])
@pytest.mark.parametrize("largest", [448.0, 57344.0], ids=["e4m3", "e5m2"])
def test_scale(largest: float, power_of_two: bool, backend: str) -> None:
    huge, tiny = torch.finfo(torch.float32).max, torch.finfo(torch.float32).smallest_normal
    peaks = [0.0, float("inf"), 1e-45, tiny, 1e-38, 3e-7, 1 / 3, 1.0, 2.0, 447.9, 448.0, 449.0, 57344.0, 1e30, huge]
    peaks += [float(p) for p in torch.rand(40, generator=torch.Generator().manual_seed(0))]
    for i, peak in enumerate(peaks):
        slots = torch.zeros(SLOTS, device=DEVICE)
        slots[i % SLOTS], slots[(i + 7) % SLOTS] = peak, peak / 2
        found = peak_scale(slots, largest, power_of_two=power_of_two, backend=backend)
        assert found.shape == (1,) and found.dtype == torch.float32
        exact = min(float(torch.tensor(largest) / torch.tensor(peak)), huge) if 0 < peak < float("inf") else 1.0
        if power_of_two:
            exact = 2.0 ** (torch.frexp(torch.tensor(exact)).exponent.item() - 1)
        assert float(found) == exact, peak


def test_scale_refuses_what_is_no_peak() -> None:
    with pytest.raises(TypeError, match=r"slots: expected fp32, got torch.bfloat16"):
        peak_scale(torch.zeros(SLOTS).bfloat16(), 448.0)
    with pytest.raises(ValueError, match=r"backend: expected one of auto, torch, triton, got 'fast'"):
        peak_scale(torch.zeros(SLOTS), 448.0, backend="fast")
