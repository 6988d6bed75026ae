"""Single mechanisms against `modules.safetensors`: depth attention, SiTU, quantile balancing, Gated MLA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from k3train.model import quantile_balancing as qb
from k3train.model.attention_residuals import _Mix, mix
from k3train.model.context import PackedStream
from k3train.model.situ import situ_glu
from tests.model.golden_model import build

GOLDEN = Path(__file__).parents[1] / "golden"
FACTS: dict[str, Any] = json.loads((GOLDEN / "modules.json").read_text())
CASES = load_file(GOLDEN / "modules.safetensors")


def case(name: str) -> dict[str, torch.Tensor]:
    tensors = {t: CASES[f"{name}.{t}"] for t in FACTS[name]["tensors"]}
    assert tensors
    return tensors


def of_kind(kind: str) -> list[str]:
    return [name for name, facts in FACTS.items() if facts["kind"] == kind]


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """max|d| / max|want|; absolute where the reference is zero."""
    scale = float(want.double().abs().max())
    return float((got.double() - want.double()).abs().max()) / (scale or 1.0)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    norm = float(want.double().norm())
    return float((got.double() - want.double()).norm()) / (norm or 1.0)


@pytest.mark.parametrize("name", of_kind("attnres"))
def test_depth_attention(name: str) -> None:
    t = case(name)
    sources = t["sources"].float().requires_grad_()
    query, norm = (t[k].float().flatten().requires_grad_() for k in ("proj_weight", "norm_weight"))
    out, _ = _Mix.apply(query, norm, 1e-5, *sources.unbind(1))
    assert off(out, t["out"]) < 2e-6
    (out * t["w_o"].float()).sum().backward()
    assert relative(sources.grad, t["grad_sources"]) < 1e-5
    if FACTS[name]["n_sources"] > 1:  # one source: the weights are constant and their gradient is rounding
        assert relative(query.grad, t["grad_proj_weight"].flatten()) < 1e-4
        assert relative(norm.grad, t["grad_norm_weight"]) < 1e-4
    else:
        assert float(query.grad.abs().max()) < 1e-5


def test_the_hand_written_backward_of_the_mix_is_the_derivative_of_its_forward() -> None:
    torch.manual_seed(0)
    sources = [torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    query, norm = (torch.randn(8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    plain, _ = mix(sources, query, norm, 1e-5)
    ours, _ = _Mix.apply(query, norm, 1e-5, *sources)
    g = torch.randn(3, 8, dtype=torch.float64)
    wanted = torch.autograd.grad(plain, [query, norm, *sources], g)
    got = torch.autograd.grad(ours, [query, norm, *sources], g)
    for a, b in zip(got, wanted):
        assert relative(a, b) < 1e-5  # the mix is fp32 inside whatever comes in


@pytest.mark.parametrize("name", of_kind("situ"))
def test_situ_glu_and_its_gradients_up_to_ten_thousand(name: str) -> None:
    t, facts = case(name), FACTS[name]
    gate, up = (t[k].float().requires_grad_() for k in ("gate", "up"))
    out = situ_glu(gate, up, facts["beta"], facts["linear_beta"])
    assert off(out, t["out"]) < 2e-6
    (out * t["w_o"].float()).sum().backward()
    for grad, want in ((gate.grad, t["grad_gate"]), (up.grad, t["grad_up"])):
        assert torch.isfinite(grad).all()
        assert off(grad, want) < 1e-5


def valid_of(t: dict[str, torch.Tensor]) -> torch.Tensor | None:
    return t["valid_mask"].bool() if "valid_mask" in t else None


@pytest.mark.parametrize("name", of_kind("qb"))
def test_quantile_balancing_routes_and_cut_offs(name: str) -> None:
    t, facts = case(name), FACTS[name]
    experts, r = qb.required_bias(t["scores"], t["bias"], facts["k"])
    if facts["min_topk_gap"] > 0:  # with exact ties the order of equal scores is anyone's
        assert torch.equal(experts.sort(-1).values.int(), t["routes"].sort(-1).values)
    alpha = (r + t["scores"].double()).max(-1).values
    assert off(alpha, t["alpha"]) < 1e-6
    valid = valid_of(t)
    routed = experts if valid is None else experts[valid]
    if facts["min_topk_gap"] > 0:
        assert torch.equal(routed.flatten().bincount(minlength=facts["n"]).int(), t["load"])


@pytest.mark.parametrize("name", of_kind("qb"))
def test_quantile_estimate_lies_within_a_bin_of_the_order_statistic(name: str) -> None:
    t, facts = case(name), FACTS[name]
    _, r = qb.required_bias(t["scores"], t["bias"], facts["k"])
    counts = qb.histogram(r, t["bias"], facts["B"], valid_of(t))
    assert int(counts.sum()) == facts["valid_tokens"] * facts["n"]
    got = qb.solve(counts, t["bias"], facts["k"])
    width = facts["bin_width"]
    assert float((got - t["ceil_order_stat"]).abs().max()) <= width * (1 + 1e-9)
    # bins are comparable one by one only where no value sits on an edge
    exact = facts["min_edge_distance_in_bins"] > 1e-6
    assert float((got - t["hist_quantile"]).abs().max()) <= (1e-6 if exact else 2 * width)
    new = qb.update(counts, t["bias"], facts["k"])
    assert abs(float(new.double().mean())) < 1e-6
    assert float((new.double() - t["hist_new_bias"]).abs().max()) <= (1e-6 if exact else 2 * width)
    if exact and "hist_counts" in t:
        assert torch.equal(counts, t["hist_counts"].long())


def test_pooled_counts_of_two_micro_batches_are_those_of_the_whole() -> None:
    t, facts = case("qb.split"), FACTS["qb.split"]
    cut = facts["split"]
    parts = [
        qb.histogram(qb.required_bias(s, t["bias"], facts["k"])[1], t["bias"], facts["B"])
        for s in (t["scores"][:cut], t["scores"][cut:])
    ]
    for part, stored in zip(parts, ("hist_counts_mb0", "hist_counts_mb1")):
        assert torch.equal(part, t[stored].long())
    whole = qb.histogram(qb.required_bias(t["scores"], t["bias"], facts["k"])[1], t["bias"], facts["B"])
    assert torch.equal(parts[0] + parts[1], whole)
    separate = torch.stack([qb.solve(p, t["bias"], facts["k"]) for p in parts]).mean(0)
    pooled = qb.solve(whole, t["bias"], facts["k"])
    assert float((separate - pooled).abs().max()) > 0.02  # averaging quantiles is another estimator


def test_repeated_exact_updates_follow_the_stored_biases() -> None:
    """The quantile itself in place of the histogram: the (q+1)-th smallest required bias."""
    t, facts = case("qb.iterate"), FACTS["qb.iterate"]
    bias = t["bias_per_step"][0].float()
    for step, violation in enumerate(facts["maxvio_before_each_update"]):
        experts, r = qb.required_bias(t["scores"], bias, facts["k"])
        load = experts.flatten().bincount(minlength=facts["n"])
        assert float(qb.max_violation(load)) == pytest.approx(violation, abs=1e-4), step
        exact = r.sort(0).values[int(facts["q"])]
        bias = (exact - exact.mean()).float()
        assert float((bias - t["bias_per_step"][step + 1].float()).abs().max()) < 1e-6


@pytest.fixture(scope="module")
def mla(one_rank: Any) -> Any:
    layer = build(one_rank, torch.float32).layers["3"].attention
    t = case("mla")
    renamed = {
        "q_a_proj.weight": "q_a_proj.weight", "q_a_layernorm.weight": "q_a_norm.weight",
        "q_b_proj.weight": "q_b_proj.weight",
        "kv_a_proj_with_mqa.weight": "kv_a_proj.weight", "kv_a_layernorm.weight": "kv_a_norm.weight",
        "kv_b_proj.weight": "kv_b_proj.weight", "g_proj.weight": "g_proj.weight", "o_proj.weight": "o_proj.weight",
    }  # fmt: skip
    parameters = dict(layer.named_parameters())
    assert set(renamed.values()) == set(parameters)
    with torch.no_grad():
        for theirs, ours in renamed.items():
            parameters[ours].copy_(t[theirs])
    return layer, {theirs: parameters[ours] for theirs, ours in renamed.items()}


def sequences(batch: int, length: int) -> PackedStream:
    return PackedStream(torch.arange(0, batch * length + 1, length, dtype=torch.int32), batch * length, length)


def test_gated_mla_forward_and_gradients(mla: Any) -> None:
    layer, parameters = mla
    t = case("mla")
    x = t["x"].float().reshape(66, 64).requires_grad_()
    layer.zero_grad()
    out = layer(x, sequences(2, 33))
    assert off(out, t["out"].reshape(66, 64)) < 2e-6
    (out * t["w_out"].float().reshape(66, 64)).sum().backward()
    assert relative(x.grad, t["grad_x"].reshape(66, 64)) < 1e-5
    for name, p in parameters.items():
        assert relative(p.grad, t[f"grad_{name}"]) < 1e-4, name


def test_the_epsilon_of_the_latent_norms_is_seen_at_small_inputs(mla: Any) -> None:
    layer, _ = mla
    t = case("mla_small")
    x, want = t["x"].float().reshape(16, 64), t["out"].reshape(16, 64)
    with torch.no_grad():
        assert off(layer(x, sequences(1, 16)), want) < 2e-5
        for norm in (layer.q_a_norm, layer.kv_a_norm):
            norm.eps = 1e-5
        changed = off(layer(x, sequences(1, 16)), want)
        for norm in (layer.q_a_norm, layer.kv_a_norm):
            norm.eps = 1e-6
    assert changed > 0.02
