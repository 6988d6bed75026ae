"""Every structural switch changes what is built, and what is built trains."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from k3train.config.schema import ModelConfig
from k3train.model.build import build_chunks, chunks_of_rank, make_context
from k3train.model.context import PackedStream
from k3train.model.k3 import K3Model
from tests.model.golden_model import tiny_a

TOKENS = torch.randint(0, 128, (48,), generator=torch.Generator().manual_seed(0))


def make(layout: Any, **switches: Any) -> K3Model:
    """tiny_a with dotted switches ("moe.latent" is written moe__latent)."""
    model: ModelConfig = tiny_a()
    for key, value in switches.items():
        *path, last = key.split("__")
        node: Any = model
        for name in path:
            node = getattr(node, name)
        assert last in {f.name for f in dataclasses.fields(node)}, key
        setattr(node, last, value)
    ctx = make_context(model, layout, torch.float32, torch.device("cpu"))
    return build_chunks(ctx, chunks_of_rank(model, layout.sizes, 0, None), seed=0)[0]


def loss_of(model: K3Model) -> torch.Tensor:
    stream = PackedStream(torch.tensor([0, 5, 6, 48], dtype=torch.int32), 48, 0)
    return model(TOKENS, TOKENS.roll(-1), stream).mean()


def names(model: K3Model) -> set[str]:
    return {n for n, _ in model.named_parameters()}


CASES: list[tuple[dict[str, Any], str | None, str | None]] = [
    # switches, a name that must be gone, a name that must be new
    ({"kda__decay_bound": None}, None, None),
    ({"kda__decay_bound": -1.0}, None, None),
    ({"kda__output_gate": "low_rank"}, "layers.0.attention.g_proj.weight", "layers.0.attention.g_a_proj.weight"),
    ({"kda__conv_size": 2}, None, None),
    ({"mla__q_lora_rank": None}, "layers.3.attention.q_a_proj.weight", "layers.3.attention.q_proj.weight"),
    ({"mla__output_gate": False}, "layers.3.attention.g_proj.weight", None),
    ({"moe__latent": None}, "layers.1.moe.latent_down.weight", None),
    ({"moe__latent_norm": False}, "layers.1.moe.latent_norm.weight", None),
    ({"moe__shared_experts": 0}, "layers.1.moe.shared_experts.gate_proj.weight", None),
    ({"moe__renormalize": False}, None, None),
    ({"moe__routed_scale": 2.5, "moe__latent_norm": False}, "layers.1.moe.latent_norm.weight", None),
    ({"dense_layers": 3}, "layers.2.moe.router.weight", "layers.2.mlp.gate_proj.weight"),
    ({"attention_residuals": "off"}, "layers.1.attention_residual.query", None),
    ({"attention_residuals": "full"}, None, None),
    ({"residual_block": 2}, None, None),
    ({"activation": "swiglu"}, None, None),
    ({"situ_beta": 1.0}, None, None),
    ({"pattern": "KKF*3"}, "layers.3.attention.kv_a_proj.weight", "layers.2.attention.kv_a_proj.weight"),
    ({"hybrid": "none"}, "layers.3.attention.kv_a_proj.weight", "layers.3.attention.q_conv"),
    ({"mixer": "gated_delta"}, "layers.0.attention.f_a_proj.weight", "layers.0.attention.a_proj.weight"),
    ({"mixer": "delta"}, "layers.0.attention.A_log", None),
    ({"mixer": "linear"}, "layers.0.attention.b_proj.weight", None),
    ({"mixer": "softmax"}, "layers.0.attention.b_proj.weight", None),
]


@pytest.fixture(scope="module")
def base(one_rank: Any) -> tuple[set[str], float]:
    model = make(one_rank)
    return names(model), float(loss_of(model))


@pytest.mark.parametrize(("switches", "gone", "new"), CASES, ids=lambda c: str(c) if isinstance(c, dict) else None)
def test_a_switch_changes_the_model_and_it_trains(
    one_rank: Any, base: tuple[set[str], float], switches: dict[str, Any], gone: str | None, new: str | None
) -> None:
    before, loss_before = base
    model = make(one_rank, **switches)
    after = names(model)
    assert gone is None or (gone in before and gone not in after)
    assert new is None or (new not in before and new in after)
    loss = loss_of(model)
    assert abs(float(loss) - loss_before) > 1e-6, "the switch changed nothing that the loss sees"
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name


@pytest.mark.parametrize("balancing", ["quantile", "sign", "aux_loss", "none"])
def test_each_way_of_balancing_moves_what_it_should(one_rank: Any, balancing: str) -> None:
    from k3train.engine import gradients

    model = make(one_rank, balancing=balancing).train()
    loss_of(model).backward()
    router = gradients.routers([model])[0]
    grad = router.weight.grad.clone()
    gradients.balance([model], one_rank)
    assert bool(router.bias.any()) == (balancing in ("quantile", "sign"))
    assert router.load is not None
    assert not router.load.any()
    assert (router.counts is not None) == (balancing == "quantile")
    assert router.counts is None or not router.counts.any()
    plain = make(one_rank, balancing="none").train()
    loss_of(plain).backward()
    same = torch.equal(grad, gradients.routers([plain])[0].weight.grad)
    assert same == (balancing != "aux_loss")


def test_layer_zeros_depth_query_is_a_buffer(one_rank: Any) -> None:
    model = make(one_rank)
    assert "layers.0.attention_residual.query" in dict(model.named_buffers())
    assert "layers.0.mlp_residual.query" in names(model)
