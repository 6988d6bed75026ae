"""The model against numbers made with the official modeling code, on the code path that trains."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.model.golden_model import build, load_golden, next_token_loss, stream_of


@pytest.fixture(scope="module")
def io(golden):  # type: ignore[no-untyped-def]
    return load_file(golden / "k3_tiny_a" / "io.safetensors")


@pytest.fixture(scope="module")
def model(one_rank, golden):  # type: ignore[no-untyped-def]
    return load_golden(build(one_rank, torch.float32), golden)


def capture(model, tokens, stream):  # type: ignore[no-untyped-def]
    seen: dict[str, torch.Tensor] = {}
    model.ctx.probe = lambda name, value: seen.__setitem__(name, value)
    try:
        seen["logits"] = model(tokens, None, stream).detach()
    finally:
        model.ctx.probe = None
    return seen


def deviation(got: torch.Tensor, want: torch.Tensor) -> float:
    want = want.reshape(got.shape).double()
    return float((got.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("kind", ["seq", "packed"])
def test_fp32_forward_matches_every_stored_tensor(model, io, kind: str) -> None:  # type: ignore[no-untyped-def]
    tokens, stream = stream_of(io, kind)
    seen = capture(model, tokens, stream)
    renamed = {"logits": "logits", "output_mix": "mix.output"}
    for i in range(9):
        renamed |= {f"hidden.{i}": f"hidden.{i}", f"kda_state.{i}": f"kda_state.{i}"}
        renamed |= {f"attn_mix.{i}": f"mix.attention.{i}", f"mlp_mix.{i}": f"mix.mlp.{i}"}
        renamed |= {f"router.{i}.scores": f"router.{i}.scores"}
    compared = 0
    for key, want in io.items():
        precision, stored_kind, *rest = key.split(".", 2)
        if precision != "fp32" or stored_kind != kind or rest[0] not in renamed:
            continue
        assert deviation(seen[renamed[rest[0]]], want) < 2e-5, key
        compared += 1
    assert compared == (9 + 6 + 8 + 8 + 9 + 2 if kind == "seq" else 9 + 6 + 8 + 2)
    loss = next_token_loss(seen["logits"], tokens, stream)
    assert abs(float(loss) - float(io[f"fp32.{kind}.loss"])) < 2e-5


@pytest.mark.parametrize("kind", ["seq", "packed"])
def test_expert_selections_are_exact_and_weights_agree(model, io, kind: str) -> None:  # type: ignore[no-untyped-def]
    tokens, stream = stream_of(io, kind)
    seen = capture(model, tokens, stream)
    for i in range(1, 9):
        experts = seen[f"router.{i}.experts"]
        assert torch.equal(experts, io[f"fp32.{kind}.router.{i}.experts"].reshape(experts.shape).long()), i
        weights = seen[f"router.{i}.weights"].gather(1, experts)
        assert deviation(weights, io[f"fp32.{kind}.router.{i}.weights"]) < 2e-5


def test_gradient_of_every_parameter_matches_fp64(model, io, golden) -> None:  # type: ignore[no-untyped-def]
    from k3train.weights import names

    tokens, stream = stream_of(io, "packed")
    model.zero_grad()
    next_token_loss(model(tokens, None, stream), tokens, stream).backward()
    stored = load_file(golden / "k3_tiny_a" / "grads_packed.safetensors")
    total = json.loads((golden / "k3_tiny_a" / "grad_norms.json").read_text())["global_grad_norm"]["packed"]
    grads = {n: p.grad for n, p in model.named_parameters()}
    checked = 0
    for entry in names.entries(model.ctx.model):
        grad = grads.get(entry.ours)
        if grad is None:  # layer 0's depth query and the balancing bias never receive one
            assert entry.hf not in stored or stored[entry.hf].abs().max() == 0, entry.hf
            continue
        grad = (grad if entry.expert is None else grad[entry.expert]).flatten().double()
        want = stored[entry.hf].flatten().double()
        if entry.hf.endswith("A_log"):
            want = want[: grad.numel()]
        got = grad if grad.numel() == want.numel() else grad[::23]
        # an element-wise subsample of a gradient that is zero up to rounding has no relative error of its own
        assert float((got - want).norm()) <= max(1e-4 * float(want.norm()), 1e-7 * total), entry.hf
        checked += 1
    assert checked > 200


def test_bf16_layer_by_layer_with_selections_forced(one_rank, golden, io) -> None:  # type: ignore[no-untyped-def]
    """Each layer gets the fp32 path's depth state, so an error is the layer's own; flips are excluded by forcing."""
    reference = load_golden(build(one_rank, torch.float32), golden)
    low = load_golden(build(one_rank, torch.bfloat16), golden)
    tokens, stream = stream_of(io, "seq")
    from k3train.model.attention_residuals import DepthState

    state = DepthState(partial=reference.embedding(tokens))
    with torch.no_grad():
        for i in range(9):
            inputs = DepthState([t.bfloat16() for t in state.bank], state.partial.bfloat16())
            if i > 0:
                low.layers[str(i)].moe.router.forced = io[f"fp32.seq.router.{i}.experts"].reshape(-1, 2).long()
            out = low.layers[str(i)](inputs, stream).partial
            state = reference.layers[str(i)](state, stream)
            error = float((out.float() - state.partial).norm() / state.partial.norm())
            assert error < 0.02, (i, error)
