"""The rungs below KDA: chunked forms against token loops in fp64, and each rung as a special case of the next."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k3kernels.delta_rule import delta_rule
from k3kernels.gated_delta import gated_delta
from k3kernels.kda import kda
from k3kernels.linear_attention import linear_attention
from tests.kernels.helpers import assert_close, kda_inputs, outputs_and_gradients

RUNGS: dict[str, tuple[Callable[..., Any], tuple[str, ...], dict[str, Any]]] = {
    "linear attention": (linear_attention, ("q", "k", "v"), {}),
    "delta rule": (delta_rule, ("q", "k", "v", "beta"), {}),
    "gated delta rule": (gated_delta, ("q", "k", "v", "z", "beta", "A_log", "dt_bias"), {}),
    "gated delta rule, bounded": (gated_delta, ("q", "k", "v", "z", "beta", "A_log", "dt_bias"), {"bound": -5.0}),
}
rungs = pytest.mark.parametrize("rung", RUNGS)


def rung_inputs(names: tuple[str, ...], scalar_gate: bool = True, **sizes: Any) -> dict[str, Tensor]:
    inputs = kda_inputs(**sizes)
    if scalar_gate:
        inputs["z"], inputs["dt_bias"] = inputs["z"][..., 0].clone(), inputs["dt_bias"][..., 0].clone()
    return {name: inputs[name] for name in (*names, "initial_state")}


def compare(rung: str, sizes: dict[str, Any], **options: Any) -> None:
    op, names, fixed = RUNGS[rung]
    inputs = rung_inputs(names, **sizes)
    for chosen in (inputs, {name: x for name, x in inputs.items() if name != "initial_state"}):
        expected, labels = outputs_and_gradients(op, chosen, backend="naive", **fixed, **options)
        actual, _ = outputs_and_gradients(op, chosen, backend="torch", **fixed, **options)
        assert_close(actual, expected, labels, 1e-10)
        actual, _ = outputs_and_gradients(op, chosen, torch.float32, backend="torch", **fixed, **options)
        assert_close(actual, expected, labels, 2e-5)


@rungs
@pytest.mark.parametrize("T", [1, 15, 17, 65, 130])
def test_any_length(rung: str, T: int) -> None:
    compare(rung, {"B": 2, "T": T})


@rungs
@pytest.mark.parametrize(("K", "V"), [(16, 64), (128, 32), (60, 100)])
def test_head_sizes_that_differ(rung: str, K: int, V: int) -> None:
    compare(rung, {"T": 70, "H": 1, "HV": 2, "K": K, "V": V})


@rungs
@pytest.mark.parametrize(
    "cu_seqlens", [[0, 0, 40], [0, 1, 1, 18, 40, 40], list(range(41))], ids=["empty first", "ragged", "single tokens"]
)
def test_packed_documents(rung: str, cu_seqlens: list[int]) -> None:
    sizes = {"T": 40, "documents": len(cu_seqlens) - 1}
    compare(rung, sizes, cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32))


@rungs
def test_scale_is_used(rung: str) -> None:
    compare(rung, {"T": 20}, scale=0.7)


def test_gated_delta_with_open_gates_is_the_delta_rule() -> None:
    inputs = rung_inputs(RUNGS["gated delta rule"][1], T=50)
    inputs["dt_bias"] = torch.full_like(inputs["dt_bias"], -1e3)
    gated, _ = gated_delta(**inputs)
    plain, _ = delta_rule(**{name: inputs[name] for name in ("q", "k", "v", "beta", "initial_state")})
    assert_close([gated], [plain], ["o"], 1e-12)


@pytest.mark.parametrize("bound", [None, -5.0], ids=["softplus", "bounded"])
def test_kda_with_equal_channels_is_gated_delta(bound: float | None) -> None:
    inputs = rung_inputs(RUNGS["gated delta rule"][1], T=50)
    scalar, _ = gated_delta(**inputs, bound=bound)
    inputs["z"] = inputs["z"].unsqueeze(-1).expand(-1, -1, -1, 16)
    inputs["dt_bias"] = inputs["dt_bias"].unsqueeze(-1).expand(-1, 16)
    channels, _ = kda(**inputs, bound=bound)
    assert_close([scalar], [channels], ["o"], 1e-12)


@rungs
def test_bad_arguments_are_refused(rung: str) -> None:
    op, names, fixed = RUNGS[rung]
    inputs = rung_inputs(names, T=8, H=2)
    with pytest.raises(ValueError, match=r"v: its 3 heads must be a multiple of the 2 heads"):
        op(**{**inputs, "v": torch.zeros(1, 8, 3, 16)}, **fixed)
    with pytest.raises(ValueError, match=r"cu_seqlens: must start at 0 and end at T = 8"):
        op(**inputs, cu_seqlens=torch.tensor([0, 9]), **fixed)
    with pytest.raises(ValueError, match=r"backend: expected one of .*got 'gpu'"):
        op(**inputs, backend="gpu", **fixed)
    for name in names[3:]:
        with pytest.raises(ValueError, match=rf"{name}: expected shape"):
            op(**{**inputs, name: torch.zeros(1, 8, 2, 16)}, **fixed)


@pytest.mark.parametrize("rung", ["delta rule", "gated delta rule", "gated delta rule, bounded"])
def test_triton_path(rung: str) -> None:
    """Under the interpreter without a GPU; KDA's kernels with gates fixed or shared by the channels of a head."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    op, names, fixed = RUNGS[rung]
    inputs = {name: x.to(device) for name, x in rung_inputs(names, T=20, documents=2).items()}
    boundaries = torch.tensor([0, 7, 20], dtype=torch.int32, device=device)
    expected, labels = outputs_and_gradients(op, inputs, backend="naive", cu_seqlens=boundaries, **fixed)
    actual, _ = outputs_and_gradients(op, inputs, torch.float32, backend="triton", cu_seqlens=boundaries, **fixed)
    assert_close(actual, expected, labels, 1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"])
@rungs
def test_on_device(rung: str, dtype: torch.dtype, tol: float) -> None:
    op, names, fixed = RUNGS[rung]
    inputs = rung_inputs(names, T=700, H=2, HV=4, K=64, V=128, documents=3)
    low = {n: x.to("cuda", dtype if n in ("q", "k", "v", "z", "beta") else torch.float32) for n, x in inputs.items()}
    boundaries = torch.tensor([0, 300, 301, 700], dtype=torch.int32)
    exact = {n: x.double().cpu() for n, x in low.items()}
    expected, labels = outputs_and_gradients(op, exact, backend="naive", cu_seqlens=boundaries, **fixed)
    actual, _ = outputs_and_gradients(op, low, cu_seqlens=boundaries.cuda(), **fixed)
    assert_close([x.cpu() for x in actual], expected, labels, tol)
