"""KDA against the golden cases: values and gradients made in fp64 without this project's code."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k3kernels.kda import kda
from tests.kernels.helpers import assert_close

GOLDEN = Path(__file__).parents[1] / "golden"
MODULES = json.loads((GOLDEN / "modules.json").read_text())
CASES = {name: case for name, case in MODULES.items() if case["kind"] == "kda"}
ARGUMENTS = {"q": "q", "k": "k", "v": "v", "z": "z", "beta": "beta_logit", "A_log": "A_log", "dt_bias": "dt_bias"}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return load_file(GOLDEN / "modules.safetensors")


def run_case(tensors: dict[str, Tensor], name: str, dtype: torch.dtype, backend: str) -> None:
    case = CASES[name]
    stored = {key[len(name) + 1 :]: t for key, t in tensors.items() if key.startswith(name + ".")}
    H, K = case["H"], case["K"]
    inputs = {ours: stored[theirs].to(dtype) for ours, theirs in ARGUMENTS.items()}
    for token_wise in ("q", "k", "v", "z", "beta"):
        inputs[token_wise] = inputs[token_wise].unsqueeze(0)
    inputs["dt_bias"] = inputs["dt_bias"].view(H, K)
    if case["has_h0"]:
        inputs["initial_state"] = stored["h0"].to(dtype)
    leaves = {key: t.requires_grad_() for key, t in inputs.items()}
    o, state = kda(
        **leaves, bound=case["lower_bound"], cu_seqlens=stored["cu_seqlens"], output_final_state=True, backend=backend
    )
    loss = (stored["w_o"].to(dtype) * o[0]).sum() + (stored["w_hT"].to(dtype) * state).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))

    golden_name = {**ARGUMENTS, "initial_state": "h0"}
    expected = [stored[f"grad_{golden_name[key]}"].view(leaves[key].shape) for key in leaves]
    forward_tol, gradient_tol = (1e-6, 1e-6) if dtype == torch.float64 else (2e-5, 1e-4)
    for actual, reference, what in ((o[0], stored["o"], "o"), (state, stored["hT"], "hT")):
        error = (actual - reference).abs().max() / reference.abs().max()
        assert error <= forward_tol, f"{what}: {error:.2e}"
    assert_close(gradients, expected, [f"d{key}" for key in leaves], gradient_tol)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["in fp64", "in fp32"])
@pytest.mark.parametrize("backend", ["naive", "torch"])
def test_golden_case(tensors: dict[str, Tensor], backend: str, dtype: torch.dtype, name: str) -> None:
    run_case(tensors, name, dtype, backend)


def test_every_golden_case_is_known() -> None:
    assert len(CASES) == 19
