"""config.json of Kimi K3 and Kimi Linear, in both directions."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from k3train.config import hf
from k3train.config.compose import compose
from k3train.config.schema import expand_pattern
from k3train.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden" / "k3_tiny_a" / "config.json"


@pytest.fixture
def golden() -> dict:
    return json.loads(GOLDEN.read_text())


def test_the_golden_configuration_reads_as_the_model_it_describes(golden):
    model = hf.from_hf(golden, name="k3_tiny_a")
    assert expand_pattern(model.pattern) == "KKKFKKKFF"
    assert (model.vocab_size, model.hidden_size, model.dense_hidden, model.dense_layers) == (128, 64, 96, 1)
    assert (model.kda.heads, model.kda.head_dim, model.kda.decay_bound, model.kda.output_gate) == (4, 16, -5.0, "full")
    assert (model.mla.q_lora_rank, model.mla.kv_lora_rank, model.mla.output_gate) == (24, 16, True)
    assert (model.moe.experts, model.moe.top_k, model.moe.latent, model.moe.latent_norm) == (8, 2, 32, True)
    assert (model.attention_residuals, model.residual_block, model.activation) == ("block", 4, "situ")


def test_the_golden_configuration_is_written_back_key_by_key(golden):
    text = golden["text_config"]
    tokens = hf.special_tokens(golden)
    assert tokens == hf.SpecialTokens(124, 125, 127)
    written = hf.to_hf(hf.from_hf(golden), tokens=tokens, max_positions=text["max_position_embeddings"])
    assert written == golden


@pytest.mark.parametrize("name", ["k3", "k3_tiny", "k3_proxy", "kimi_linear_48b"])
def test_every_shipped_model_survives_the_round_trip(name):
    model = compose([f"model={name}"]).model
    again = hf.from_hf(json.loads(json.dumps(hf.to_hf(model))), name=model.name)
    # Decided by a training run, unread by inference clients, or without meaning when residual attention is off.
    free = {"balancing": model.balancing, "backend": model.backend, "pattern": model.pattern}
    if model.attention_residuals == "off":
        free["residual_block"] = model.residual_block
    assert dataclasses.replace(again, **free) == model
    assert expand_pattern(again.pattern) == expand_pattern(model.pattern)


def test_the_released_layer_lists_are_one_based_and_end_in_two_full_layers():
    linear = hf.to_hf(compose(["model=k3"]).model)["text_config"]["linear_attn_config"]
    assert linear["full_attn_layers"][:2] == [4, 8]
    assert linear["full_attn_layers"][-2:] == [92, 93]
    assert len(linear["full_attn_layers"]) == 24 and len(linear["kda_layers"]) == 69


@pytest.mark.parametrize("letters", ["KKKFKKKFF", "K", "FFFF", "KKKK", "KFKFKKF", "KKKF" * 23 + "F"])
def test_a_pattern_keeps_its_layers_when_written_short(letters):
    assert expand_pattern(hf.compact_pattern(letters)) == letters


def test_the_short_pattern_of_the_release_is_the_one_people_write():
    assert hf.compact_pattern("KKKF" * 23 + "F") == "KKKF*23 F"


def test_kimi_linear_is_chosen_only_for_a_model_without_the_additions_of_k3():
    assert hf.format_of(compose(["model=kimi_linear_48b"]).model) == "kimi_linear"
    assert hf.format_of(compose(["model=k3_tiny"]).model) == "kimi_k3"
    with pytest.raises(ConfigError, match=r"model.kda.decay_bound=-5.*export.format=kimi_k3"):
        hf.format_of(compose(["model=k3_tiny"]).model, "kimi_linear")


@pytest.mark.parametrize(
    ("override", "names"),
    [("model.mixer=delta", "model.mixer"), ("model.attention_residuals=full", "attention_residuals=full")],
)
def test_a_model_that_no_client_knows_is_refused_by_its_key(override, names):
    with pytest.raises(ConfigError, match=names):
        hf.to_hf(compose(["model=k3_tiny", override]).model)


def broken(change):
    config = json.loads(GOLDEN.read_text())
    change(config["text_config"])
    return config


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda t: t.pop("kv_lora_rank"), "kv_lora_rank"),
        (lambda t: t["linear_attn_config"].pop("num_heads"), "linear_attn_config.num_heads"),
        (lambda t: t["linear_attn_config"]["kda_layers"].append(4), r"layers \[4\].*both|layers \[4\]"),
        (lambda t: t["linear_attn_config"]["kda_layers"].remove(5), r"layers \[5\] are in neither"),
        (lambda t: t["linear_attn_config"]["full_attn_layers"].append(10), r"layers \[10\] do not exist"),
        (lambda t: t["linear_attn_config"].__setitem__("kda_layers", [0, 1, 2, 4, 5, 6]), r"layers \[4\]"),
        (lambda t: t.update(num_key_value_heads=2), "num_key_value_heads=2"),
        (lambda t: t.update(hidden_act="gelu"), "gelu"),
        (lambda t: t.update(num_nextn_predict_layers=1), "num_nextn_predict_layers"),
        (lambda t: t.update(topk_group=2), "topk_group"),
    ],
    ids=[
        "a missing key", "a missing nested key", "a layer in both lists", "a layer in no list", "a layer too many",
        "zero-based lists", "grouped keys", "another activation", "an MTP layer", "grouped routing",
    ],
)  # fmt: skip
def test_a_configuration_that_contradicts_the_architecture_is_refused_by_its_key(change, names):
    with pytest.raises(ConfigError, match=names):
        hf.from_hf(broken(change))


def test_another_model_type_is_refused():
    with pytest.raises(ConfigError, match="llama"):
        hf.from_hf({"model_type": "llama"})


def test_quantisation_is_declared_where_k3_declares_it_and_can_be_taken_out(golden):
    before = copy.deepcopy(golden)
    quantised = hf.with_quantization(golden, {"format": "mxfp4-pack-quantized"})
    assert quantised["text_config"]["quantization_config"] == {"format": "mxfp4-pack-quantized"}
    assert "quantization_config" not in quantised
    assert golden == before
    assert hf.with_quantization(quantised, None) == before
    assert hf.from_hf(quantised) == hf.from_hf(golden)
