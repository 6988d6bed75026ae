"""KDA kernels on the device: every configuration the launcher can choose, races, graphs, large offsets, long streams."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.helpers import assert_close, kda_inputs, loss_weights, outputs_and_gradients
from tests.kernels.kda_rounding import predicted_errors
from tests.kernels.test_kda_golden import ARGUMENTS, CASES, GOLDEN

pytest.importorskip("triton")
from k3kernels.kda import kda
from k3kernels.kda.triton import launch, plan
from k3kernels.kda.triton.api import kda_triton

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
naive = partial(kda, backend="naive")
BOUNDS = [0, 0, 1, 66, 66, 130, 300]
KINDS = {
    "random": (1.0, 0.0, 0.0),
    "saturated gates": (1.0, 6.0, 0.0),
    "open gates": (1.0, -6.0, 0.0),
    "repeated keys, beta near 1": (1.0, -7.0, 1.0),
    "gates of any size": (10.0, 0.0, 0.0),
}


def make(
    kind: str, T: int, dtype: torch.dtype = torch.bfloat16, K: int = 128, V: int = 128, **shape: int
) -> dict[str, Tensor]:
    x = kda_inputs(T=T, K=K, V=V, **shape)
    slope, shift, repeat = KINDS[kind]
    x["z"] = x["z"] * slope + shift
    if repeat:
        x["k"] = x["k"][:, :1] + 0.3 * x["k"]
        x["beta"] = 0.3 * x["beta"] + 4
    tokens = ("q", "k", "v", "z", "beta")
    return {name: t.to("cuda", dtype if name in tokens else torch.float32) for name, t in x.items()}


def terms_of_beta(x: dict[str, Tensor], **options: object) -> Tensor:
    """Root sum square over value columns of what each gives to dbeta [B, T, HV], in fp64.

    Columns do not know of each other, so that each may be a head of its own: one value channel, the same gates."""
    V = x["v"].shape[-1]
    y = {
        n: t.double() if n in ("q", "k") else t.double().repeat_interleave(V, min(2, t.dim() - 1)) for n, t in x.items()
    }
    y["A_log"], y["dt_bias"] = (x[n].double().repeat_interleave(V, 0) for n in ("A_log", "dt_bias"))
    y["v"] = x["v"].double().flatten(2).unsqueeze(-1)
    if "initial_state" in x:
        y["initial_state"] = x["initial_state"].double().mT.flatten(1, 2).unsqueeze(-1)
    y["beta"].requires_grad_()
    o, state = naive(**y, output_final_state=True, **options)
    assert state is not None
    B, T, HV, K = x["z"].shape
    of_o, of_state = loss_weights(o.new_empty(B, T, HV, V), o.new_empty(state.shape[0], HV, K, V))
    loss = (of_o.view_as(o) * o).sum() + (of_state.mT.flatten(1, 2).unsqueeze(-1) * state).sum()
    (gradient,) = torch.autograd.grad(loss, y["beta"])
    return gradient.unflatten(2, (HV, V)).square().sum(-1).sqrt()


def rounding_scores(
    x: dict[str, Tensor], dA_log: Tensor, dbeta: Tensor, expected: dict[str, Tensor], **options: Any
) -> tuple[Tensor, float]:
    """Errors of dA_log per head, and of dbeta as a whole, over what rounding predicts for these inputs (kda_rounding.py)."""
    bound, cu = options["bound"], options.get("cu_seqlens")
    block = plan.plan(x["q"], x["v"], x["z"], bound, None, None).config.block
    of_o, of_state = loss_weights(expected["o"], expected["final_state"])
    deviation, of_dbeta = predicted_errors(x, of_o, of_state, bound, block, cu, probes=2)
    scores = (dA_log.double() - expected["dA_log"]) / deviation
    return scores, (dbeta.double() - expected["dbeta"]).norm().item() / of_dbeta


def check(x: dict[str, Tensor], tol: float = 1e-2, room: float = 1.0, **options: Any) -> None:
    """Everything at tol relative to itself, but dbeta and dA_log: sums over all value columns of a token (tokens and channels
    of a head), which may cancel to any size while what they add up keeps its rounding.

    bf16: dA_log within four standard deviations of its rounding error per head, dbeta within three times the expected
    size of its own.  room: times that, where a call rounds at more places than kda_rounding.py knows.
    fp32: relative to the root sum square of the terms."""
    expected, names = outputs_and_gradients(naive, x, torch.float64, **options)
    actual, _ = outputs_and_gradients(kda_triton, x, None, **options)
    want, got = dict(zip(names, expected)), dict(zip(names, actual))
    if x["q"].dtype == torch.bfloat16:
        scores, ratio = rounding_scores(x, got["dA_log"], got["dbeta"], want, **options)
        assert (scores.abs() <= 4 * room).all(), f"dA_log: {scores} standard deviations of its rounding error"
        assert ratio <= 3 * room, f"dbeta: {ratio:.2f} times the expected rounding error"
    else:
        terms = want["dz"] * (x["z"].double() + x["dt_bias"].double())
        scale = terms.square().sum((0, 1, 3)).sqrt() + want["dA_log"].abs()
        error = ((got["dA_log"].double() - want["dA_log"]).abs() / scale).max()
        assert error <= 2 * tol, f"dA_log: {error:.2e} of its terms"
        error = (got["dbeta"].double() - want["dbeta"]).norm() / terms_of_beta(x, **options).norm()
        assert error <= tol, f"dbeta: {error:.2e} of its terms"
    rest = [n for n in names if n not in ("dA_log", "dbeta")]
    assert_close([got[n] for n in rest], [want[n] for n in rest], rest, tol)


@pytest.fixture(params=[64, 128], ids=["64 value columns a program", "128 value columns a program"])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(plan, "split_values", lambda *_: request.param == 64)
    return request.param


@pytest.fixture
def no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_device", lambda _: (False, 132))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bound", [-5.0, -5.9, None], ids=["bound -5", "bound -5.9", "softplus"])
def test_explicit_layouts(columns: int, bound: float | None, kind: str) -> None:
    check(make(kind, 200), bound=bound)


@pytest.mark.parametrize("z", [3.0, 6.0, -7.0], ids=["strong", "saturated", "hardly any"])
@pytest.mark.parametrize("bound", [-5.0, -5.9, None], ids=["bound -5", "bound -5.9", "softplus"])
def test_one_decay_everywhere(bound: float | None, z: float) -> None:
    """The slope of the gate is one number here, so that dz errs by as much as the gradient of g itself, which is a
    difference of large sums where gates are saturated.  Rounding alone gives 2.5e-3 to 3.8e-3 (kda_rounding.py)."""
    x = make("random", 200)
    x |= {"z": torch.full_like(x["z"], z), "A_log": x["A_log"] * 0, "dt_bias": x["dt_bias"] * 0}
    check(x, bound=bound)


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bound -5", "softplus"])
def test_later_tokens_do_not_reach_earlier_outputs(columns: int, bound: float | None) -> None:
    """Bit for bit up to the 32-token half in which the change lies."""
    x = make("random", 200)
    o, _ = kda_triton(**x, bound=bound)
    for border in (32, 64, 96, 128):
        for name in ("q", "k", "v", "z", "beta"):
            changed = {**x, name: x[name].clone()}
            changed[name][:, border:] *= -3.0
            other, _ = kda_triton(**changed, bound=bound)
            assert torch.equal(o[:, :border], other[:, :border]), (border, name)
            assert not torch.equal(o[:, border:], other[:, border:]), (border, name)


def test_more_documents_times_heads_than_a_short_grid_takes() -> None:
    """2,100 documents of one token and 64 heads: 134,400 states; a grid's second and third dimension end at 65,535."""
    N, H = 2_100, 64
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, N, H, 128)
    x = {n: torch.randn(shape, device="cuda", generator=generator).bfloat16() for n in ("q", "k", "v", "z")}
    x |= {"beta": x["q"][..., 0].contiguous()}
    x |= {"A_log": torch.zeros(H, device="cuda"), "dt_bias": torch.zeros(H, 128, device="cuda")}

    def run(first: int) -> list[Tensor]:
        leaves = {n: (t[:, first:] if t.dim() > 2 else t).clone().requires_grad_() for n, t in x.items()}
        cu = torch.arange(N - first + 1, dtype=torch.int32, device="cuda")
        o, _ = kda_triton(**leaves, cu_seqlens=cu)
        return [t[:, -3:] for t in (o, *torch.autograd.grad(o, list(leaves.values())[:5], torch.ones_like(o)))]

    for a, b in zip(run(0), run(N - 3)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bound -5", "softplus"])
@pytest.mark.parametrize("kind", ["random", "repeated keys, beta near 1"])
def test_sums_err_as_rounding_predicts(bound: float | None, kind: str) -> None:
    """Over 32 heads, so that a fault that adds as much as rounding does cannot hide in the room of one head."""
    x = make(kind, 200, H=32)
    expected, names = outputs_and_gradients(naive, x, torch.float64, bound=bound)
    actual, _ = outputs_and_gradients(kda_triton, x, None, bound=bound)
    want, got = dict(zip(names, expected)), dict(zip(names, actual))
    scores, ratio = rounding_scores(x, got["dA_log"], got["dbeta"], want, bound=bound)
    assert scores.square().mean().sqrt() < 1.5, scores
    assert ratio < 1.5


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bound -5", "softplus"])
def test_explicit_layouts_on_packed_documents(columns: int, bound: float | None) -> None:
    x = make("random", 300, documents=len(BOUNDS) - 1)
    check(x, bound=bound, cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bound -5", "softplus"])
def test_explicit_layouts_in_segments(columns: int, bound: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "split_stream", lambda *_: 4)
    check(make("open gates", 500), room=2.0, bound=bound)  # starts of segments are found by products with transitions


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bound -5", "softplus"])
def test_slices_of_a_stream_give_the_bits_of_the_whole(bound: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a graph; long enough for serial and chunk-parallel kernels to be under way together."""
    x = make("open gates", 8_001, H=16)
    whole, names = outputs_and_gradients(kda_triton, x, None, bound=bound)
    monkeypatch.setattr(plan, "slice_stream", lambda *_: 4)
    for _ in range(5):
        for name, a, b in zip(names, whole, outputs_and_gradients(kda_triton, x, None, bound=bound)[0]):
            assert torch.equal(a, b), name
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        o, state = kda_triton(**x, bound=bound, output_final_state=True)
    graph.replay()
    assert torch.equal(o, whole[0])
    assert torch.equal(state, whole[1])


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 65, 1000])
def test_explicit_layouts_at_length(T: int) -> None:
    check(make("random", T, B=2, H=1, HV=2), tol=1.5e-2, bound=-5.0)


@pytest.mark.parametrize("bound", [-5.0, -5.9, None], ids=["bound -5", "bound -5.9", "softplus"])
def test_plain_kernels_at_the_same_size(no_hopper: None, bound: float | None) -> None:
    check(make("random", 200), bound=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("K", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("V", [16, 128, 256])
def test_plain_kernels(K: int, V: int, dtype: torch.dtype) -> None:
    check(make("random", 130, dtype, K, V), 1e-2 if dtype == torch.bfloat16 else 5e-5, bound=-5.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("K", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("V", [32, 64])
def test_sizes_between(K: int, V: int, dtype: torch.dtype) -> None:
    check(make("random", 130, dtype, K, V), 1e-2 if dtype == torch.bfloat16 else 5e-5, bound=-5.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("K", "V"), [(16, 32), (32, 128), (64, 64), (128, 16), (256, 32)], ids=str)
def test_sizes_without_a_bound(K: int, V: int, dtype: torch.dtype) -> None:
    check(make("gates of any size", 130, dtype, K, V), 1e-2 if dtype == torch.bfloat16 else 1e-4, bound=None)


@pytest.mark.parametrize("name", CASES)
def test_golden_case(name: str) -> None:
    from safetensors.torch import load_file

    case = CASES[name]
    prefix = name + "."
    stored = {k[len(prefix) :]: t for k, t in load_file(GOLDEN / "modules.safetensors").items() if k.startswith(prefix)}
    x = {ours: stored[theirs].float() for ours, theirs in ARGUMENTS.items()}
    x |= {n: x[n].unsqueeze(0) for n in ("q", "k", "v", "z", "beta")}
    x["dt_bias"] = x["dt_bias"].view(case["H"], case["K"])
    if case["has_h0"]:
        x["initial_state"] = stored["h0"].float()
    leaves = {n: t.cuda().requires_grad_() for n, t in x.items()}
    o, state = kda_triton(
        **leaves, bound=case["lower_bound"], cu_seqlens=stored["cu_seqlens"].cuda(), output_final_state=True
    )
    loss = (stored["w_o"].cuda().float() * o[0]).sum() + (stored["w_hT"].cuda().float() * state).sum()
    gradients = [g.cpu() for g in torch.autograd.grad(loss, list(leaves.values()))]
    theirs = {**ARGUMENTS, "initial_state": "h0"}
    expected = [stored[f"grad_{theirs[n]}"].view(leaves[n].shape) for n in leaves]
    assert_close([o[0].cpu(), state.cpu(), *gradients], [stored["o"], stored["hT"], *expected],
                 ["o", "final_state", *leaves], 2e-4)  # fmt: skip


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bound -5", "softplus"])
def test_fifty_runs_give_the_same_bits(columns: int, bound: float | None) -> None:
    x = make("random", 2050)
    first, names = outputs_and_gradients(kda_triton, x, None, bound=bound)
    for _ in range(50):
        again, _ = outputs_and_gradients(kda_triton, x, None, bound=bound)
        for name, a, b in zip(names, first, again):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bound -5", "softplus"])
def test_direct_launches_give_the_same_bits(bound: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make("random", 300)
    monkeypatch.setattr(launch, "DIRECT", False)
    expected, names = outputs_and_gradients(kda_triton, x, None, bound=bound)
    monkeypatch.setattr(launch, "DIRECT", True)
    for T in (300, 300, 200, 300, 200):  # other lengths, other alignments: the first time each takes the long way
        part = {n: t[:, :T] if t.dim() > 2 and n != "initial_state" else t for n, t in x.items()}
        found, _ = outputs_and_gradients(kda_triton, part, None, bound=bound)
        if T == 300:
            for name, a, b in zip(names, expected, found):
                assert torch.equal(a, b), name


def test_strided_inputs_are_read_in_place() -> None:
    x = make("random", 200)
    packed = torch.cat([x[n] for n in ("q", "k", "v", "z")], dim=-1)
    views = dict(zip(("q", "k", "v", "z"), packed.split(128, dim=-1)))
    o, state = kda_triton(**x, output_final_state=True)
    other, other_state = kda_triton(**{**x, **views}, output_final_state=True)
    assert torch.equal(o, other)
    assert torch.equal(state, other_state)


def test_graph_replay_with_other_documents() -> None:
    x = {n: t.requires_grad_() for n, t in make("random", 300, documents=len(BOUNDS) - 1).items()}
    cu = torch.tensor(BOUNDS, dtype=torch.int32, device="cuda")

    def step() -> list[Tensor]:
        o, state = kda_triton(**x, cu_seqlens=cu, output_final_state=True)
        return [o, state, *torch.autograd.grad(o.float().sum() + state.sum(), list(x.values()))]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for bounds in (BOUNDS, [0, 7, 100, 100, 164, 299, 300]):
        cu.copy_(torch.tensor(bounds, dtype=torch.int32))
        graph.replay()
        for got, expected in zip(captured, step()):
            assert torch.equal(got, expected)


def test_more_than_two_to_the_31_elements() -> None:
    """The last document of a stream whose tensors exceed 2^31 elements, against the same document alone."""
    T, H, tail = 180_000, 96, 130
    generator = torch.Generator("cuda").manual_seed(0)
    x = {
        n: torch.randn(1, T, H, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
        for n in ("q", "k", "v", "z")
    }
    x["beta"] = torch.randn(1, T, H, device="cuda", dtype=torch.bfloat16, generator=generator)
    shared = {"A_log": torch.zeros(H, device="cuda"), "dt_bias": torch.zeros(H, 128, device="cuda")}
    assert x["q"].numel() > 2**31

    def run(x: dict[str, Tensor], cu: list[int]) -> list[Tensor]:
        leaves = {n: t.requires_grad_() for n, t in x.items()}
        o, _ = kda_triton(**leaves, **shared, cu_seqlens=torch.tensor(cu, dtype=torch.int32, device="cuda"))
        return [
            o[:, -tail:],
            *(g[:, -tail:] for g in torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))),
        ]

    alone = run({n: t[:, -tail:].detach().clone() for n, t in x.items()}, [0, tail])
    whole = run(x, [0, T - tail, T])
    for a, b in zip(alone, whole):
        assert torch.equal(a, b)


def test_a_million_tokens_do_not_drift() -> None:
    """Weak decay over 2^20 tokens in segments: the state stays at bf16 noise of the fp64 recurrence's."""
    segment, worst = 2**16, 0.0
    state = reference = None
    first = make("open gates", segment, H=1)
    del first["initial_state"]
    for i in range(16):
        x = {n: t.roll(i * 1001, 1) if t.dim() > 2 else t for n, t in first.items()}
        with torch.no_grad():
            _, state = kda_triton(**x, initial_state=state, output_final_state=True)
            exact = {n: t.double() for n, t in x.items()}
            _, reference = kda(**exact, initial_state=reference, output_final_state=True, backend="torch")
        worst = max(worst, ((state - reference).norm() / reference.norm()).item())
    assert worst < 1e-2, worst
