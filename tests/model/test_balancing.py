"""Quantile balancing against stored numbers, order statistics and re-splits of the batch; the simpler rules beside it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k3train.model import quantile_balancing as qb

CASES = ["divisible", "nondivisible", "first_step_zero_bias", "ties", "padding", "split", "wide", "k1_fig5_like"]


@pytest.fixture(scope="module")
def stored(golden: Path) -> dict[str, torch.Tensor]:
    return load_file(golden / "modules.safetensors")


@pytest.fixture(scope="module")
def about(golden: Path) -> dict[str, dict]:  # type: ignore[type-arg]
    return json.loads((golden / "modules.json").read_text())


def case(stored: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(f"qb.{name}."): v for k, v in stored.items() if k.startswith(f"qb.{name}.")}


def scores_of(tokens: int, experts: int, seed: int, skew: float = 1.0) -> torch.Tensor:
    """Sigmoid scores of a router that prefers some experts strongly; fresh for every seed, the preference fixed."""
    generator = torch.Generator().manual_seed(seed)
    preference = torch.linspace(-skew, skew, experts)
    return torch.sigmoid(preference + torch.randn(tokens, experts, generator=generator))


def load_of(experts: torch.Tensor, count: int) -> torch.Tensor:
    return torch.bincount(experts.reshape(-1), minlength=count)


@pytest.mark.parametrize("name", CASES)
def test_stored_case(stored, about, name: str) -> None:  # type: ignore[no-untyped-def]
    c, info = case(stored, name), about[f"qb.{name}"]
    valid = c["valid_mask"].bool() if "valid_mask" in c else None
    experts, r = qb.required_bias(c["scores"], c["bias"], info["k"])
    if info["min_topk_gap"] > 0:
        assert torch.equal(experts.sort(-1).values, c["routes"].long().sort(-1).values)
        kept = experts if valid is None else experts[valid]
        assert torch.equal(load_of(kept, info["n"]), c["load"].long())
    counts = qb.histogram(r, c["bias"], info["B"], valid)
    assert int(counts.sum()) == info["valid_tokens"] * info["n"]
    if "hist_counts" in c:
        assert torch.equal(counts, c["hist_counts"].long())
    estimate = qb.solve(counts, c["bias"], info["k"])
    width = info["bin_width"]
    # the estimate lies in the bin of the ceil(q)-th value, whatever the exact quantile between two values is
    assert float((estimate - c["ceil_order_stat"]).abs().max()) <= width * (1 + 1e-9)
    # where a value sits on a bin edge the stored number's own rounding decides: two bins there, equality elsewhere
    on_edge = info["min_edge_distance_in_bins"] < 1e-6
    assert float((estimate - c["hist_quantile"]).abs().max()) <= (2 * width if on_edge else 1e-6)
    new = qb.update(counts, c["bias"], info["k"])
    assert new.dtype == torch.float32
    assert float((new - c["hist_new_bias"]).abs().max()) <= (2 * width if on_edge else 1e-6)
    assert abs(float(new.double().mean())) < 1e-7


def test_first_step_bins_the_point_mass_in_fp64(stored) -> None:  # type: ignore[no-untyped-def]
    """With equal biases r = 0 lies exactly on the edge of bin 500; the floor in fp32 would say 499."""
    c = case(stored, "first_step_zero_bias")
    _, r = qb.required_bias(c["scores"], c["bias"], 2)
    assert int((r == 0).sum()) == 64  # the cut-off expert of each token has its own bias exactly
    counts = qb.histogram(r, c["bias"], 1000)
    assert int(counts[:, 500].sum()) >= 64


@pytest.mark.parametrize("experts,k,tokens", [(8, 3, 509), (48, 4, 777), (7, 2, 97), (896, 16, 1024)])
def test_estimate_is_within_a_bin_of_the_order_statistic(experts: int, k: int, tokens: int) -> None:
    bias = 0.1 * torch.randn(experts, generator=torch.Generator().manual_seed(1))
    _, r = qb.required_bias(scores_of(tokens, experts, 0), bias, k)
    estimate = qb.solve(qb.histogram(r, bias, 1000), bias, k)
    want = r.sort(dim=0).values[math.ceil(tokens * k / experts) - 1]
    lo, hi = qb.bin_range(bias)
    assert float((estimate - want).abs().max()) <= float(hi - lo) / 1000 * (1 + 1e-9)


@pytest.mark.parametrize("parts", [1, 4, 16])
@pytest.mark.parametrize("experts,k,tokens", [(8, 2, 512), (7, 3, 509)], ids=["divisible", "nondivisible"])
def test_bias_is_bit_identical_under_any_split(parts: int, experts: int, k: int, tokens: int) -> None:
    """Pooled counts are integers: the global batch may be cut into any micro-batches."""
    scores, bias = scores_of(tokens, experts, 3), torch.linspace(-0.2, 0.2, experts)
    whole = qb.histogram(qb.required_bias(scores, bias, k)[1], bias, 1000)
    counts = sum(qb.histogram(qb.required_bias(s, bias, k)[1], bias, 1000) for s in scores.tensor_split(parts))
    assert isinstance(counts, torch.Tensor) and torch.equal(counts, whole)
    assert torch.equal(qb.update(counts, bias, k), qb.update(whole, bias, k))


def test_padding_enters_neither_counts_nor_target() -> None:
    scores, bias = scores_of(200, 8, 5), torch.zeros(8)
    valid = torch.rand(200, generator=torch.Generator().manual_seed(0)) > 0.3
    with_padding = qb.histogram(qb.required_bias(scores, bias, 2)[1], bias, 1000, valid)
    without = qb.histogram(qb.required_bias(scores[valid], bias, 2)[1], bias, 1000)
    assert torch.equal(with_padding, without)
    assert torch.equal(qb.update(with_padding, bias, 2), qb.update(without, bias, 2))


@pytest.mark.parametrize(
    "experts,k,tokens,steps", [(64, 4, 8192, 8), (896, 16, 8192, 6)], ids=["64 experts top-4", "896 experts top-16"]
)
def test_a_skewed_router_is_balanced_from_the_fifth_step(experts: int, k: int, tokens: int, steps: int) -> None:
    """Fresh tokens every step, a fixed strong preference; the bound is 1.5 times the noise of a fair draw's maximum."""
    bias = torch.zeros(experts)
    bound = 1.5 * math.sqrt(4 * math.log(experts) * experts / (tokens * k))
    violations = []
    for step in range(steps):
        chosen, r = qb.required_bias(scores_of(tokens, experts, 100 + step), bias, k)
        violations.append(float(qb.max_violation(load_of(chosen, experts))))
        bias = qb.update(qb.histogram(r, bias, 1000), bias, k)
    assert violations[0] > 2 * bound, "the router is not skewed enough to prove anything"
    assert max(violations[4:]) <= bound, (violations, bound)


def test_ema_blends_the_estimate_with_the_old_bias() -> None:
    scores, bias = scores_of(512, 8, 7), torch.linspace(-0.3, 0.3, 8)
    counts = qb.histogram(qb.required_bias(scores, bias, 2)[1], bias, 1000)
    blended = 0.75 * bias.double() + 0.25 * qb.solve(counts, bias, 2)
    assert torch.allclose(qb.update(counts, bias, 2, ema=0.75).double(), blended - blended.mean(), atol=1e-7)
    assert not torch.allclose(qb.update(counts, bias, 2), qb.update(counts, bias, 2, ema=0.75))


def test_sign_rule_moves_by_a_fixed_step_towards_the_mean_load() -> None:
    load, bias = torch.tensor([10, 2, 4, 4]), torch.zeros(4)
    moved = qb.sign_update(load, bias, 1e-3)
    assert moved.argmin() == 0 and moved[1] > moved[0]
    assert abs(float(moved.mean())) < 1e-9
    assert torch.allclose(moved - moved[0], torch.tensor([0.0, 2e-3, 2e-3, 2e-3]), atol=1e-9)


def test_no_tokens_leave_the_bias_alone() -> None:
    bias = torch.tensor([0.1, -0.1, 0.0])
    assert torch.equal(qb.update(torch.zeros(3, 10, dtype=torch.int64), bias, 1), bias)
