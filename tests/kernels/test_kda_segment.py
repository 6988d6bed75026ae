"""A stream cut into pieces, with states handed on by the fold, equals the stream in one shot: outputs and gradients."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from k3kernels.kda import first_document_state, fold_segments, kda, kda_segment, local_cu_seqlens
from tests.kernels.helpers import assert_close, kda_inputs

TOKENS = 60
NAMES = ["o", "dq", "dk", "dv", "dz", "dbeta", "dA_log", "ddt_bias"]


def in_pieces(leaves: dict[str, Tensor], cu_seqlens: Tensor, cuts: list[int], **options: object) -> Tensor:
    """What the ranks of a context-parallel group compute together: cuts are 0 ... T."""
    spans = list(zip(cuts, cuts[1:]))
    locals_ = [local_cu_seqlens(cu_seqlens, *span) for span in spans]
    pieces = [{n: leaves[n][:, a:b] for n in ("q", "k", "v", "z", "beta")} for a, b in spans]
    shared = {n: leaves[n] for n in ("A_log", "dt_bias")}
    summaries = [
        kda_segment(**{n: x for n, x in piece.items() if n != "q"}, **shared, cu_seqlens=local, **options)
        for piece, local in zip(pieces, locals_)
    ]
    all_M, all_S = (torch.stack(x) for x in zip(*summaries))
    outputs = []
    for r, (piece, local) in enumerate(zip(pieces, locals_)):
        entering = fold_segments(all_M[:r], all_S[:r])
        state = first_document_state(entering, len(local) - 1)
        outputs.append(kda(**piece, **shared, cu_seqlens=local, initial_state=state, **options)[0])
    return torch.cat(outputs, 1)


def results(inputs: dict[str, Tensor], dtype: torch.dtype, run: object) -> list[Tensor]:
    leaves = {n: x.to(dtype).requires_grad_() for n, x in inputs.items() if n != "initial_state"}
    o = run(leaves)  # type: ignore[operator]
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    return [o, *torch.autograd.grad((o * weight).sum(), list(leaves.values()))]


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "softplus"])
@pytest.mark.parametrize(
    "cu_seqlens",
    [[0, 60], [0, 20, 60], [0, 30, 60], [0, 7, 8, 45, 60], [0, 15, 30, 45, 60], [0, 0, 30, 30, 60, 60], [*range(61)]],
    ids=["one document", "two", "border at a cut", "one token", "every cut a border", "empty ones", "all of one token"],
)
@pytest.mark.parametrize(
    "cuts",
    [[0, 60], [0, 30, 60], [0, 15, 30, 60], [0, 15, 30, 45, 60], [0, 1, 59, 60], [0, 0, 30, 30, 60], [0, 60, 60]],
    ids=["uncut", "halves", "thirds", "quarters", "single tokens", "empty pieces", "empty last piece"],
)
def test_pieces_equal_one_shot(cuts: list[int], cu_seqlens: list[int], bound: float | None) -> None:
    boundaries = torch.tensor(cu_seqlens, dtype=torch.int32)
    inputs = kda_inputs(T=TOKENS, H=1, HV=2, K=16, V=8)
    inputs["dt_bias"] = inputs["dt_bias"] - 4.0  # slow decay, so that the far past matters
    expected = results(
        inputs, torch.float64, lambda x: kda(**x, cu_seqlens=boundaries, bound=bound, backend="naive")[0]
    )
    for dtype, tol in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        actual = results(inputs, dtype, lambda x: in_pieces(x, boundaries, cuts, bound=bound, backend="torch"))
        assert_close(actual, expected, NAMES, tol)


def test_the_far_past_matters_in_these_cases() -> None:
    inputs = {n: x for n, x in kda_inputs(T=TOKENS, H=1, HV=2, K=16, V=8).items() if n != "initial_state"}
    inputs["dt_bias"] = inputs["dt_bias"] - 4.0
    one, _ = kda(**inputs)
    alone, _ = kda(**{n: (x[:, 45:] if n in ("q", "k", "v", "z", "beta") else x) for n, x in inputs.items()})
    assert (one[:, 45:] - alone).norm() > 0.1 * one[:, 45:].norm()


def test_the_naive_backend_gives_the_same_summary() -> None:
    inputs = {n: x for n, x in kda_inputs(T=33, K=16, V=24).items() if n not in ("q", "initial_state")}
    assert_close(kda_segment(**inputs, backend="torch"), kda_segment(**inputs, backend="naive"), ["M", "S"], 1e-12)


def test_summary_of_borders_and_empty_streams() -> None:
    inputs = {n: x for n, x in kda_inputs(T=20).items() if n not in ("q", "initial_state")}
    M, S = kda_segment(**inputs, cu_seqlens=torch.tensor([0, 12, 20]))
    assert not M.any()
    assert S.any()
    M, S = kda_segment(**inputs, cu_seqlens=torch.tensor([0, 20, 20]))
    assert not M.any()
    assert not S.any()
    empty = {n: (x[:, :0] if n in ("k", "v", "z", "beta") else x) for n, x in inputs.items()}
    M, S = kda_segment(**empty)
    assert torch.equal(M, torch.eye(16, dtype=M.dtype).expand_as(M))
    assert not S.any()


def test_local_boundaries() -> None:
    whole = torch.tensor([0, 5, 5, 9, 20], dtype=torch.int32)
    spans = {(0, 5): [0, 5, 5, 5], (5, 9): [0, 4, 4], (5, 8): [0, 3], (4, 10): [0, 1, 1, 5, 6], (9, 20): [0, 11, 11]}
    for (start, end), expected in spans.items():
        assert local_cu_seqlens(whole, start, end).tolist() == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: local_cu_seqlens(torch.tensor([0, 9]), 4, 12),
            r"start, end: expected 0 <= start <= end <= 9, got 4, 12",
        ),
        (lambda: fold_segments(torch.zeros(2, 1, 4, 3), torch.zeros(2, 1, 4, 3)), r"M, S: expected \[R, HV, K, K\]"),
        (lambda: first_document_state(torch.zeros(1, 4, 4), 0), r"documents: expected at least 1, got 0"),
    ],
    ids=["span outside the stream", "M not square", "no documents"],
)
def test_bad_argument_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_a_batch_is_refused() -> None:
    inputs = {n: x for n, x in kda_inputs(B=2, T=8).items() if n not in ("q", "initial_state")}
    with pytest.raises(ValueError, match=r"k: a segment is one stream \[1, T, H, K\], got \[2, 8, 2, 16\]"):
        kda_segment(**inputs)


def test_the_triton_backend_gives_the_same_summary() -> None:
    """Under the interpreter without a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = {n: x.to(device) for n, x in kda_inputs(T=20, K=16, V=32).items() if n not in ("q", "initial_state")}
    leaves = {n: x.float().requires_grad_() for n, x in inputs.items()}
    actual = kda_segment(**leaves, backend="triton")
    exact = {n: x.requires_grad_() for n, x in inputs.items()}
    expected = kda_segment(**exact, backend="torch")
    gradients = [
        torch.autograd.grad(sum((x * x).sum() for x in summary), list(given.values()))
        for summary, given in ((actual, leaves), (expected, exact))
    ]
    names = ["M", "S", *(f"d{n}" for n in inputs)]
    assert_close([*actual, *gradients[0]], [*expected, *gradients[1]], names, 1e-4)


def summary_and_gradients(inputs: dict[str, Tensor], **options: object) -> list[Tensor]:
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()}
    summary = kda_segment(**leaves, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in summary]
    loss = sum((x * w).sum() for x, w in zip(summary, weights))
    return [*summary, *torch.autograd.grad(loss, list(leaves.values()))]


@pytest.fixture
def poisoned() -> Iterator[None]:
    """What a kernel does not write is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("start", "size"), [*((start, 16) for start in (0, 1, 37, 64, 69, 70)), pytest.param(37, 256, id="M and S apart")]
)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.filterwarnings("ignore")
def test_a_start_that_only_the_device_knows(start: int, size: int) -> None:
    """The kernels never see the tokens before; gradients there are zero, not what the memory held."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = {n: x for n, x in kda_inputs(T=70, H=1, K=size, V=16).items() if n not in ("q", "initial_state")}
    inputs["dt_bias"] = inputs["dt_bias"] - 4.0
    # without a border in front, M stays
    after = {n: x[:, start:] if n in ("k", "v", "z", "beta") else x for n, x in inputs.items()}
    expected = summary_and_gradients(after, backend="torch")
    for i, x in enumerate(inputs.values()):
        if x.dim() > 2 and x.shape[1] == 70:
            expected[2 + i] = torch.cat([torch.zeros_like(x[:, :start]), expected[2 + i]], 1)
    names = ["M", "S", *(f"d{n}" for n in inputs)]
    at = torch.tensor([start], dtype=torch.int32)
    assert_close(summary_and_gradients(inputs, start=at, backend="torch"), expected, names, 1e-12)
    on_device = {n: x.to(device, torch.float32) for n, x in inputs.items()}
    actual = summary_and_gradients(on_device, start=at.to(device), backend="triton")
    assert_close([x.cpu() for x in actual], expected, names, 1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": torch.tensor([1]), "cu_seqlens": torch.tensor([0, 8])}, "start: give it or cu_seqlens, not both"),
        ({"start": torch.tensor(1)}, r"start: expected int32 or int64 \[1\] on cpu, got torch.int64 \[\]"),
        ({"start": torch.tensor([9])}, "start: expected 0 <= start <= T = 8, got 9"),
    ],
    ids=["two ways to say it", "no dimension", "behind the stream"],
)
def test_a_bad_start_is_refused(options: dict[str, Tensor], message: str) -> None:
    inputs = {n: x for n, x in kda_inputs(T=8).items() if n not in ("q", "initial_state")}
    with pytest.raises(ValueError, match=message):
        kda_segment(**inputs, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (256, 256)], ids=str)
def test_summary_on_device(K: int, V: int) -> None:
    inputs = {n: x for n, x in kda_inputs(T=500, K=K, V=V).items() if n not in ("q", "initial_state")}
    expected = kda_segment(**inputs)
    actual = kda_segment(**{n: x.to("cuda", torch.float32) for n, x in inputs.items()})
    assert_close([x.cpu() for x in actual], expected, ["M", "S"], 1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
@pytest.mark.parametrize("start", [0, 1, 1000, 4095])
def test_a_start_on_device_is_the_slice_and_nothing_waits_for_it(start: int) -> None:
    """bf16 and heads as the model has them; what is not written is NaN."""
    inputs = {n: x for n, x in kda_inputs(T=4096, K=128, V=128).items() if n not in ("q", "initial_state")}
    inputs = {n: x.cuda() if x.dim() < 3 else x.cuda().bfloat16() for n, x in inputs.items()}
    inputs |= {n: inputs[n].float() for n in ("A_log", "dt_bias")}
    after = {n: x[:, start:] if n in ("k", "v", "z", "beta") else x for n, x in inputs.items()}
    expected = summary_and_gradients(after)
    for i, x in enumerate(inputs.values()):
        if x.dim() > 2:
            expected[2 + i] = torch.cat([torch.zeros_like(x[:, :start]), expected[2 + i]], 1)
    at = torch.tensor([start], device="cuda")
    for mode in ("default", "error"):  # the first time compiles, and waits
        poison = [torch.full((1 << 26,), torch.nan, device="cuda") for _ in range(4)]
        del poison
        leaves = {n: x.detach().requires_grad_() for n, x in inputs.items()}
        torch.cuda.set_sync_debug_mode(mode)
        try:
            M, S = kda_segment(**leaves, start=at)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.isfinite(M).all() and torch.isfinite(S).all()
    names = ["M", "S", *(f"d{n}" for n in inputs)]
    assert_close(summary_and_gradients(inputs, start=at), expected, names, 1e-3)
