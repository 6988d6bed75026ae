"""The Triton KDA kernels against the fp64 recurrence, in fp32.

On a machine without a GPU they run under Triton's interpreter, which shows their logic but not races, layouts or
compiler faults; with a GPU the same tests run the compiled kernels.  The explicit-layout kernels for Hopper are the business of
test_kda_triton_gpu.py: the interpreter does not know them.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.kernels.helpers import assert_close, kda_inputs, outputs_and_gradients
from tests.kernels.test_kda_golden import CASES, GOLDEN

pytest.importorskip("triton")
from k3kernels.kda import kda
from k3kernels.kda.triton import plan
from k3kernels.kda.triton.api import kda_triton
from k3kernels.kda.triton.common import FLOOR2
from k3kernels.kda.triton.plan import block_size, choose

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's overflow in entries that are masked later
kda_naive = partial(kda, backend="naive")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(inputs: dict[str, Tensor], tol: float = 1e-4, **options: object) -> None:
    cu = options.get("cu_seqlens")
    expected, names = outputs_and_gradients(kda_naive, inputs, torch.float64, **options)
    on_device = {name: x.to(DEVICE, torch.float32) for name, x in inputs.items()}
    if cu is not None:
        options["cu_seqlens"] = cu.to(DEVICE)
    actual, _ = outputs_and_gradients(kda_triton, on_device, None, **options)
    assert_close([x.cpu() for x in actual], expected, names, tol)


@pytest.mark.parametrize("T", [1, 2, 7, 15, 16, 17, 63, 65])
def test_length(T: int) -> None:
    check(kda_inputs(T=T, H=1), bound=-5.0)


@pytest.mark.parametrize(("K", "V"), [(16, 64), (64, 32), (32, 256), (256, 16)], ids=lambda size: f"{size} channels")
def test_key_and_value_sizes(K: int, V: int) -> None:
    check(kda_inputs(T=33, H=1, K=K, V=V), bound=-5.0)


@pytest.mark.parametrize("bound", [-5.0, -5.9, -0.1, None], ids=["bound -5", "bound -5.9", "weak bound", "softplus"])
@pytest.mark.parametrize("shift", [0.0, 8.0, -8.0], ids=["random gates", "saturated gates", "open gates"])
def test_gate(bound: float | None, shift: float) -> None:
    inputs = kda_inputs(T=70, H=1)
    inputs["z"] = inputs["z"] * 2 + shift
    check(inputs, tol=2e-4, bound=bound)


def test_softplus_gate_far_below_underflow() -> None:
    inputs = kda_inputs(T=70, H=1)
    inputs["z"] = inputs["z"] * 30
    inputs["A_log"] = inputs["A_log"] + 2
    check(inputs, tol=2e-4, bound=None)


@pytest.mark.parametrize("bound", [-5.0, -5.9, None], ids=["bound -5", "bound -5.9", "softplus"])
@pytest.mark.parametrize("shift", [3.0, 6.0, -7.0], ids=["strong", "saturated", "hardly any"])
def test_gradient_of_a_decay_that_is_the_same_everywhere(shift: float, bound: float | None) -> None:
    """The slope of the gate is one number here, so that dz errs by as much as the gradient of g itself, which is a
    difference of large sums where gates are saturated."""
    inputs = kda_inputs(T=70, H=1)
    for name in ("A_log", "dt_bias"):
        inputs[name] = torch.zeros_like(inputs[name])
    inputs["z"] = torch.full_like(inputs["z"], shift)
    check(inputs, tol=2e-4, bound=bound)


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bound -5", "softplus"])
@pytest.mark.parametrize("z", [100.0, -100.0])
def test_raw_gate_of(z: float, bound: float | None) -> None:
    inputs = kda_inputs(T=40, H=1)
    inputs["z"] = torch.full_like(inputs["z"], z)
    expected, names = outputs_and_gradients(kda_naive, inputs, torch.float64, bound=bound)
    on_device = {name: x.to(DEVICE, torch.float32) for name, x in inputs.items()}
    actual, _ = outputs_and_gradients(kda_triton, on_device, None, bound=bound)
    for name, x in zip(names, actual):
        assert x.isfinite().all(), name
    assert_close([x.cpu() for x in actual[:2]], expected[:2], names[:2], 1e-4)


def test_gate_with_huge_rate_has_finite_gradients() -> None:
    inputs = kda_inputs(T=20, H=1)
    inputs["A_log"] = torch.full_like(inputs["A_log"], 90.0)
    actual, names = outputs_and_gradients(
        kda_triton, {n: x.to(DEVICE, torch.float32) for n, x in inputs.items()}, None, bound=-5.0
    )
    for name, x in zip(names, actual):
        assert x.isfinite().all(), name


@pytest.mark.parametrize(
    "bounds",
    [[0, 0, 1, 66, 66, 100], [0, 100], [0, 64, 65, 100, 100], [0, 1, 2, 3, 100]],
    ids=["empty, one-token and 65-token documents", "one document", "borders at chunk borders", "many short documents"],
)
@pytest.mark.parametrize("state", [True, False], ids=["initial states", "no initial state"])
def test_packed_documents(bounds: list[int], state: bool) -> None:
    inputs = kda_inputs(T=100, H=1, documents=len(bounds) - 1)
    if not state:
        del inputs["initial_state"]
    check(inputs, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), bound=-5.0)


@pytest.mark.parametrize("documents", [3, 70], ids=["fewer documents than a block", "more documents than a block"])
def test_only_empty_documents_hand_the_state_through(documents: int) -> None:
    inputs = kda_inputs(T=1, H=1, documents=documents)
    bounds = torch.zeros(documents + 1, dtype=torch.int32)
    bounds[-1] = 1
    check(inputs, cu_seqlens=bounds, bound=-5.0)


def test_no_tokens() -> None:
    inputs = {name: x.float().to(DEVICE) for name, x in kda_inputs(T=0).items()}
    o, state = kda_triton(**inputs, output_final_state=True)
    assert o.shape == (1, 0, 2, 16)
    assert torch.equal(state, inputs["initial_state"])


def test_batch_and_grouped_value_heads() -> None:
    check(kda_inputs(B=2, T=20, H=1, HV=2), bound=-5.0)


@pytest.mark.parametrize(("segments", "T"), [(2, 100), (3, 130)], ids=["two segments", "three segments"])
def test_stream_cut_into_segments(segments: int, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "split_stream", lambda *_: segments)
    inputs = kda_inputs(T=T, H=1)
    inputs["z"] = inputs["z"] - 4  # so that a state outlives a segment
    if segments == 2:
        del inputs["initial_state"]
    check(inputs, bound=-5.0)


@pytest.mark.parametrize("T", [100, 130], ids=["two slices", "three slices, the last one short"])
def test_slices_of_a_stream_give_the_bits_of_the_whole(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {name: x.to(DEVICE, torch.float32) for name, x in kda_inputs(T=T, H=1, HV=2).items()}
    whole, names = outputs_and_gradients(kda_triton, inputs, None, bound=-5.0)
    monkeypatch.setattr(plan, "slice_stream", lambda *_: 3)
    for name, a, b in zip(names, whole, outputs_and_gradients(kda_triton, inputs, None, bound=-5.0)[0]):
        assert torch.equal(a, b), name


def test_only_long_streams_with_few_heads_are_cut() -> None:
    assert plan.slice_stream(chunks=1024, programs=64, processors=132) == 4
    assert plan.slice_stream(chunks=1024, programs=96, processors=132) == 1
    assert plan.slice_stream(chunks=512, programs=64, processors=132) == 2
    assert plan.slice_stream(chunks=511, programs=64, processors=132) == 1
    assert plan.split_stream(chunks=1024, programs=64, processors=132) == 1
    assert plan.split_stream(chunks=1024, programs=32, processors=132) == 4
    assert plan.split_stream(chunks=1024, programs=8, processors=132) == 8
    assert plan.split_stream(chunks=100, programs=8, processors=132) == 1


def test_scale() -> None:
    check(kda_inputs(T=20, H=1), bound=-5.0, scale=0.7)


def test_repeated_keys_with_beta_near_one() -> None:
    inputs = kda_inputs(T=70, H=1)
    inputs["k"] = inputs["k"][:, :1].expand(-1, 70, -1, -1) + 0.01 * inputs["k"]
    inputs["beta"] = inputs["beta"] * 0.1 + 4
    inputs["z"] = inputs["z"] - 8
    check(inputs, tol=3e-4, bound=-5.0)


@pytest.mark.parametrize("name", ["q", "k"])
def test_zero_rows_of(name: str) -> None:
    inputs = kda_inputs(T=20, H=1)
    inputs[name][:, 5:9] = 0.0
    check(inputs, bound=-5.0)


@pytest.mark.parametrize("logit", [-200.0, 200.0], ids=["beta 0", "beta 1"])
def test_extreme(logit: float) -> None:
    inputs = kda_inputs(T=20, H=1)
    inputs["beta"] = torch.full_like(inputs["beta"], logit)
    check(inputs, bound=-5.0)


def test_strided_inputs() -> None:
    inputs = kda_inputs(T=40, H=2)
    packed = torch.cat([inputs[n] for n in ("q", "k", "v", "z")], dim=-1)
    views = dict(zip(("q", "k", "v", "z"), packed.float().to(DEVICE).split(16, dim=-1)))
    dense = {name: x.float().to(DEVICE) for name, x in inputs.items()}
    turned = dense["initial_state"].mT.contiguous().mT
    expected, names = outputs_and_gradients(kda_triton, dense, None, bound=-5.0)
    leaves = {**dense, **views, "initial_state": turned}
    assert not leaves["q"].is_contiguous()
    o, state = kda_triton(**leaves, bound=-5.0, output_final_state=True)
    assert torch.equal(o, expected[0])
    assert torch.equal(state, expected[1])


@pytest.mark.parametrize(
    ("border", "tol"), [(64, 0.0), (32, 0.0), (40, 1e-5)], ids=["chunk border", "half border", "inside a half"]
)
def test_later_tokens_do_not_reach_earlier_outputs(border: int, tol: float) -> None:
    """Bit for bit up to the 32-token half in which the change lies.  Inside that half the products are anchored in its
    middle, so that later gates move earlier outputs by rounding, and by nothing else."""
    inputs = {name: x.float().to(DEVICE) for name, x in kda_inputs(T=70, H=1).items()}
    o, _ = kda_triton(**inputs, bound=-5.0)
    for name in ("q", "k", "v", "z", "beta"):
        changed = {**inputs, name: inputs[name].clone()}
        changed[name][:, border:] *= -3.0
        other, _ = kda_triton(**changed, bound=-5.0)
        assert (o[:, :border] - other[:, :border]).norm() <= tol * o[:, :border].norm(), name


def test_repeated_runs_give_the_same_bits() -> None:
    inputs = {name: x.float().to(DEVICE) for name, x in kda_inputs(T=70, H=1).items()}
    first, names = outputs_and_gradients(kda_triton, inputs, None, bound=-5.0)
    again, _ = outputs_and_gradients(kda_triton, inputs, None, bound=-5.0)
    for name, a, b in zip(names, first, again):
        assert torch.equal(a, b), name


def test_gradient_of_the_final_state_alone() -> None:
    inputs = {name: x.float().to(DEVICE).requires_grad_() for name, x in kda_inputs(T=20, H=1).items()}
    _, state = kda_triton(**inputs, output_final_state=True)
    gradients = torch.autograd.grad(state.square().sum(), list(inputs.values()))
    reference = {name: x.detach().double().cpu().requires_grad_() for name, x in inputs.items()}
    _, state = kda_naive(**reference, output_final_state=True)
    expected = torch.autograd.grad(state.square().sum(), list(reference.values()), allow_unused=True)
    pairs = [(name, a.cpu(), e) for name, a, e in zip(inputs, gradients, expected) if e is not None]
    assert_close([a for _, a, _ in pairs], [e for _, _, e in pairs], [n for n, _, _ in pairs], 1e-4)
    assert not gradients[0].any()  # q does not reach the state


def test_no_gradient_keeps_no_buffers() -> None:
    inputs = {name: x.float().to(DEVICE) for name, x in kda_inputs(T=20, H=1).items()}
    o, _ = kda_triton(**inputs)
    assert o.grad_fn is None


@pytest.mark.parametrize("name", CASES)
def test_golden_case(name: str) -> None:
    from safetensors.torch import load_file

    from tests.kernels.test_kda_golden import run_case

    if DEVICE == "cuda":
        pytest.skip("the golden runner works on the CPU; test_kda_triton_gpu.py covers the device")
    run_case(load_file(GOLDEN / "modules.safetensors"), name, torch.float32, "triton")


def test_block_size_keeps_factors_in_the_normal_range() -> None:
    for bound in (-5.9, -5.5, -5.4, -5.0, -1.0):
        assert block_size(bound, low=True) / 2 * -bound * 1.4427 < 126
        assert block_size(bound, low=False) / 2 * -bound * 1.4427 < 126 - 22
    assert block_size(None, low=False) / 2 * -FLOOR2.value < 126 - 22


def test_configuration_depends_on_shapes_alone() -> None:
    few = choose(128, 128, torch.bfloat16, -5.0, states=32, hopper=True, processors=132)
    many = choose(128, 128, torch.bfloat16, -5.0, states=96, hopper=True, processors=132)
    assert (few.state_bv, many.state_bv) == (64, 128)
    assert not choose(128, 128, torch.float32, -5.0, 96, True, 132).hopper
    assert not choose(128, 128, torch.bfloat16, -5.0, 96, False, 132).hopper
