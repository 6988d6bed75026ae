"""The name table against the golden checkpoint, the released inventory, and transformers' own class."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from k3train.config import hf
from k3train.config.compose import compose
from k3train.errors import ConfigError, WeightsError
from k3train.weights import names

GOLDEN = Path(__file__).parents[1] / "golden" / "k3_tiny_a"


@pytest.fixture(scope="module")
def tiny():
    return hf.from_hf(json.loads((GOLDEN / "config.json").read_text()))


def test_names_shapes_and_dtypes_are_those_of_the_golden_checkpoint(tiny):
    table = {e.hf: (e.hf_shape, e.dtype) for e in names.entries(tiny)}
    stored = {name: (tuple(t.shape), t.dtype) for name, t in load_file(GOLDEN / "model.safetensors").items()}
    assert table == stored


def test_every_golden_tensor_comes_back_bit_for_bit(tiny):
    with safe_open(GOLDEN / "model.safetensors", "pt") as file:
        for entry in names.entries(tiny):
            stored = file.get_tensor(entry.hf)
            ours = entry.from_hf(stored)
            assert tuple(ours.shape) == entry.shape
            assert torch.equal(entry.to_hf(ours), stored), entry.hf
            # Held in float32 while training, as a freshly imported model may be.
            assert torch.equal(entry.to_hf(ours.float()), stored), entry.hf


def test_our_names_are_unique_and_experts_count_from_the_first_to_the_last(tiny):
    table = list(names.entries(tiny))
    assert len({(e.ours, e.expert) for e in table}) == len(table) == len({e.hf for e in table})
    stack = [e.expert for e in table if e.ours == "layers.3.moe.experts.w2"]
    assert stack == list(range(8))


def test_the_gate_is_w1_and_the_up_projection_w3(tiny):
    stored = load_file(GOLDEN / "model.safetensors")
    table = {(e.ours, e.expert): e for e in names.entries(tiny)}
    w1 = table["layers.1.moe.experts.w1", 5]
    assert w1.hf == "language_model.model.layers.1.block_sparse_moe.experts.5.w1.weight"
    assert not torch.equal(stored[w1.hf], stored[w1.hf.replace("w1", "w3")])


def test_the_whole_of_k3_adds_up_to_the_released_inventory():
    model = compose(["model=k3"]).model
    count = Counter()
    live = 0
    for e in names.entries(model):
        count["F32" if e.dtype == torch.float32 else "BF16"] += 1
        count["expert"] += e.is_routed_expert
        count["residual"] += "_res_" in e.hf
        live += prod(e.shape)
    assert count["F32"] == 506
    assert count["expert"] == 92 * 896 * 3
    assert count["residual"] == 374
    assert live == pytest.approx(2.779484e12, abs=1e6)


def test_kimi_linear_48b_adds_up_to_the_published_count():
    model = compose(["model=kimi_linear_48b"]).model
    assert sum(prod(e.hf_shape) for e in names.entries(model, "kimi_linear")) == 49_122_681_728


SMALL_LINEAR = [
    "model=kimi_linear_48b", "model.vocab_size=96", "model.hidden_size=64", "model.pattern=KKF K",
    "model.dense_hidden=96", "model.kda.heads=2", "model.kda.head_dim=16", "model.mla.heads=2",
    "model.mla.kv_lora_rank=16",
    "model.mla.nope_dim=16", "model.mla.shared_dim=8", "model.mla.v_dim=16", "model.moe.experts=4", "model.moe.top_k=2",
    "model.moe.expert_hidden=32",
]  # fmt: skip


@pytest.mark.parametrize("q_lora", ["null", "24"], ids=["full-rank queries", "low-rank queries"])
def test_kimi_linear_names_are_the_ones_that_transformers_itself_saves(tmp_path, q_lora):
    transformers = pytest.importorskip("transformers")
    model = compose([*SMALL_LINEAR, f"model.mla.q_lora_rank={q_lora}"]).model
    config = transformers.KimiLinearConfig(**hf.to_hf(model))
    client = transformers.KimiLinearForCausalLM(config)
    client.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    # It reads a dense layer from `mlp.`, as released, but its inverse renaming writes `block_sparse_moe.` there too.
    saved = {name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): shape for name, shape in saved.items()}
    assert {e.hf: e.hf_shape for e in names.entries(model, "kimi_linear")} == saved


def test_padding_of_the_decay_rates_that_is_not_zero_is_refused_by_name(tiny):
    entry = next(e for e in names.entries(tiny) if e.ours == "layers.2.attention.A_log")
    assert (entry.shape, entry.hf_shape) == ((4,), (128,))
    padded = torch.zeros(128)
    padded[4] = 1e-3
    with pytest.raises(WeightsError, match=r"layers.2.self_attn.A_log.*4..127.*num_heads"):
        entry.from_hf(padded)


def test_a_head_count_that_needs_no_padding_is_stored_as_it_is():
    model = compose(["model=k3_tiny", "model.kda.heads=128"]).model
    entry = next(e for e in names.entries(model) if e.ours.endswith("A_log"))
    assert entry.hf_shape == (128,)
    assert entry.from_hf(torch.ones(128)).sum() == 128


def test_a_misshapen_tensor_is_refused_by_name_in_both_directions(tiny):
    entry = next(e for e in names.entries(tiny) if e.ours == "layers.3.attention.q_b_proj.weight")
    with pytest.raises(WeightsError, match=r"layers.3.self_attn.q_b_proj.*\[96, 25\].*\[96, 24\]"):
        entry.from_hf(torch.zeros(96, 25))
    with pytest.raises(WeightsError, match=r"layers.3.attention.q_b_proj"):
        entry.to_hf(torch.zeros(24, 96))


@pytest.mark.parametrize(
    ("override", "absent"),
    [
        ("model.moe.shared_experts=0", "shared_experts"),
        ("model.moe.latent_norm=false", "routed_expert_norm"),
        ("model.attention_residuals=off", "_res_"),
        ("model.mla.output_gate=false", "layers.3.self_attn.g_proj"),
        ("model.mla.q_lora_rank=null", "q_a_proj"),
        ("model.kda.output_gate=low_rank", "layers.0.self_attn.g_proj"),
        ("model.hybrid=none", "kv_b_proj"),
    ],
)
def test_a_switch_that_removes_a_mechanism_removes_its_tensors(override, absent):
    def table(*more):
        return {e.hf for e in names.entries(compose(["model=k3_tiny", *more]).model)}

    assert any(absent in name for name in table())
    assert not any(absent in name for name in table(override))


def test_an_unknown_format_is_refused(tiny):
    with pytest.raises(ConfigError, match="gguf"):
        next(names.entries(tiny, "gguf"))
