"""Closed-form parameter counts against models that are built, for every switch, and K3 itself on the meta device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from k3train.config.compose import compose
from k3train.config.schema import ModelConfig
from k3train.model.build import build_meta
from k3train.planning import memory, parameters
from tests.model.golden_model import tiny_a


def counted(model: ModelConfig, layout: Any) -> int:
    built = build_meta(model, layout)
    assert all(p.is_meta for p in built.parameters())
    return sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize(
    "switch",
    [
        {}, {"attention_residuals": "off"}, {"attention_residuals": "full"}, {"mixer": "gated_delta"}, {"mixer": "delta"},
        {"mixer": "linear"}, {"mixer": "softmax"}, {"hybrid": "none"}, {"dense_layers": 4}, {"mtp_layers": 1},
    ],
    ids=str,
)  # fmt: skip
def test_closed_form_equals_the_built_model(one_rank: Any, switch: dict[str, Any]) -> None:
    model = dataclasses.replace(tiny_a(), **switch)
    unused = 2 * model.hidden_size if model.attention_residuals != "off" else 0  # layer 0's vectors are buffers
    biases = model.moe.experts * (9 - model.dense_layers + model.mtp_layers)
    total = parameters.count(model).total
    assert total in (counted(model, one_rank) + unused, counted(model, one_rank) + unused + biases)


@pytest.mark.parametrize(("name", "total"), [("k3", 2_779_484_000_000), ("kimi_linear_48b", 49_122_681_728)])
def test_published_models_build_on_the_meta_device(one_rank: Any, name: str, total: int) -> None:
    model = compose([f"model={name}"]).model
    built = build_meta(model, one_rank)
    tensors = [*built.parameters(), *(b for n, b in built.named_buffers() if getattr(b, "k3", None) is not None)]
    numel = sum(t.numel() for t in tensors)
    if name == "k3":
        assert abs(numel - total) < 5_000_000
    else:
        assert numel == total


@pytest.mark.parametrize("name", ["k3_tiny", "kimi_linear_48b"])
def test_every_layer_and_every_stage_is_counted_as_it_is_built(one_rank: Any, name: str) -> None:
    """Stages cut by cost hold different layers: each rank's share, not the mean, is what must fit."""
    config = compose([f"model={name}"])
    built = build_meta(config.model, one_rank)
    sizes = []
    for i, layer in built.layers.items():
        tensors = [*layer.parameters(), *(b for b in layer.buffers() if getattr(b, "k3", None) is not None)]
        sizes.append(sum(t.numel() for t in tensors))
        parts = parameters.of_layer(config.model, int(i))
        assert parts.split + parts.replicated + parts.experts == sizes[-1], i
    config.parallel.pipeline, config.parallel.virtual = 2, 2
    ranks = [memory.layers_of_rank(config, rank) for rank in range(2)]
    assert sorted(ranks[0] + ranks[1]) == list(range(len(sizes)))
    ends = [config.model.vocab_size * config.model.hidden_size] * 2
    ends[1] += sum(p.numel() for n, p in built.named_parameters() if n.startswith(("final_norm", "output_residual")))
    held = [sum(sizes[i] for i in layers) + end for layers, end in zip(ranks, ends)]
    fullest = memory.rank_parameters(config, 2)
    assert fullest.dense + fullest.experts == max(held)
