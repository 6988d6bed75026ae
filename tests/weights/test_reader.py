"""Folders in: whatever does not fit is refused with the name of the tensor or the file."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3train.errors import ConfigError, WeightsError
from k3train.weights.reader import HFFolder

from .helpers import GOLDEN, MOE, change_tensors, golden_folder, golden_tensors

E1W2 = MOE.format(1) + "experts.1.w2.weight"


@pytest.mark.parametrize("packed", [False, True], ids=["bfloat16 experts", "MXFP4 experts"])
def test_the_golden_folder_reads_under_our_names_with_its_exact_values(tmp_path, packed):
    folder = HFFolder(golden_folder(tmp_path, packed=packed))
    want = golden_tensors()
    assert folder.packed == packed and folder.format == "kimi_k3" and folder.tokens.eos == 125
    for (name, expert), entry in folder.table.items():
        assert torch.equal(folder.read(name, expert), entry.from_hf(want[entry.hf])), entry.hf
    stack = folder.read("layers.5.moe.experts.w1")
    for expert in (0, 7):  # the first and the last are the ones that off-by-one errors hit
        assert torch.equal(stack[expert], want[MOE.format(5) + f"experts.{expert}.w1.weight"])


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("layers.0.attention.q_proj.weight", 0),
        ("layers.3.attention.o_proj.weight", 1),
        ("embedding.weight", 0),
        ("layers.0.attention.q_conv", 0),
        ("layers.0.attention.dt_bias", 0),
        ("layers.0.attention.A_log", 0),
    ],
)
def test_a_tensor_parallel_shard_is_the_slice_of_the_whole(tmp_path, name, axis):
    folder = HFFolder(golden_folder(tmp_path))
    whole = folder.read(name)
    half = whole.shape[axis] // 2
    assert torch.equal(folder.read_part(name, axis, half, 2 * half), whole.narrow(axis, half, half))


@pytest.mark.parametrize(
    ("packed", "change", "message"),
    [
        (False, lambda t: t.pop("language_model.model.norm.weight"), r"missing language_model.model.norm.weight"),
        (False, lambda t: t.pop(E1W2), rf"missing {E1W2}"),
        (True, lambda t: t.pop(E1W2 + "_scale"), rf"missing {E1W2}_scale"),
        (True, lambda t: t.pop(E1W2 + "_packed"), rf"missing {E1W2}_packed"),
        (False, lambda t: t.update({"language_model.extra": torch.ones(1)}), r"unused language_model.extra"),
        (True, lambda t: t.update({E1W2: torch.ones(32, 32).bfloat16()}), rf"unused {E1W2}_packed"),
        (False, lambda t: t.update({E1W2: torch.ones(32, 31).bfloat16()}), rf"{E1W2}.*\[32, 31\].*\[32, 32\]"),
        (False, lambda t: t.update({E1W2: torch.ones(32, 32, dtype=torch.int8)}), rf"{E1W2}.*int8"),
        (True, lambda t: t.update({E1W2 + "_scale": torch.ones(32, 1)}), rf"{E1W2}_scale.*float32.*bytes"),
        (True, lambda t: t.update({E1W2 + "_scale": torch.ones(32, 2, dtype=torch.uint8)}), rf"{E1W2}_scale.*\[32, 1"),
    ],
    ids=[
        "a missing tensor", "a missing expert", "packed without scale", "scale without packed", "an unknown tensor",
        "an expert stored twice", "a misshapen expert", "an integer weight", "float scales", "scales per 16",
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_refused_by_name(tmp_path, packed, change, message):
    folder = change_tensors(golden_folder(tmp_path, packed=packed), change)
    with pytest.raises(WeightsError, match=message):
        HFFolder(folder)


def test_padding_of_the_decay_rates_that_is_not_zero_is_refused(tmp_path):
    name = "language_model.model.layers.4.self_attn.A_log"
    folder = change_tensors(golden_folder(tmp_path), lambda t: t[name].__setitem__(100, 0.5))
    with pytest.raises(WeightsError, match=rf"{name}.*padding.*num_heads"):
        HFFolder(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t["linear_attn_config"].update(num_heads=8), r"layers.0.self_attn.*\[64"),
        (lambda t: t.update(num_attention_heads=8, num_key_value_heads=8), r"layers.3.self_attn.*shape"),
        (
            lambda t: t["linear_attn_config"].update(full_attn_layers=[3, 8, 9], kda_layers=[1, 2, 4, 5, 6, 7]),
            r"missing language_model.model.layers.2.self_attn.kv_a_proj",
        ),
        (lambda t: t.update(num_experts=9), r"experts.8.w1"),
        (lambda t: t.update(num_experts=7), r"shape \[8, 64\]|unused"),
        (lambda t: t.update(first_k_dense_replace=2), r"missing language_model.model.layers.1.mlp"),
    ],
    ids=[
        "another KDA head count", "another MLA head count", "another layer pattern", "an expert too many",
        "an expert too few", "another dense layer",
    ],
)  # fmt: skip
def test_a_configuration_of_another_model_is_refused_by_a_tensor(tmp_path, edit, message):
    folder = golden_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    edit(config["text_config"])
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=message):
        HFFolder(folder)


def test_nan_in_a_weight_is_refused_when_it_is_read(tmp_path):
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    folder = HFFolder(change_tensors(golden_folder(tmp_path), lambda t: t[name].__setitem__((2, 3), float("nan"))))
    with pytest.raises(WeightsError, match=rf"{name}.*1 values"):
        folder.read("layers.0.mlp.up_proj.weight")


def test_a_scale_of_nan_is_refused_with_its_row(tmp_path):
    name = E1W2 + "_scale"
    folder = HFFolder(change_tensors(golden_folder(tmp_path, packed=True), lambda t: t[name].__setitem__((9, 0), 255)))
    with pytest.raises(WeightsError, match=r"experts.1.w2.*255.*row 9"):
        folder.read("layers.1.moe.experts.w2", 1)


def test_packed_experts_that_the_configuration_does_not_declare_are_refused(tmp_path):
    folder = golden_folder(tmp_path, packed=True)
    (folder / "config.json").write_text((GOLDEN / "k3_tiny_a" / "config.json").read_text())
    with pytest.raises(WeightsError, match="quantization_config"):
        HFFolder(folder)


def test_another_quantisation_format_is_refused(tmp_path):
    folder = golden_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"format": "nvfp4-pack-quantized"}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="nvfp4"):
        HFFolder(folder)


def test_the_vision_tower_of_the_release_is_skipped_and_counted(tmp_path):
    extra = {"vision_tower.patch_embed.weight": torch.ones(2), "mm_projector.proj.0.weight": torch.ones(2)}
    folder = HFFolder(change_tensors(golden_folder(tmp_path), lambda t: t.update(extra)))
    assert sorted(folder.skipped) == sorted(extra)


def sharded(folder):
    """The golden model in two files with an index."""
    golden_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    parts = {"a.safetensors": names[:40], "b.safetensors": names[40:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder, index


def test_a_sharded_folder_of_another_writer_reads_like_the_single_file(tmp_path):
    folder, _ = sharded(tmp_path)
    assert torch.equal(HFFolder(folder).read("final_norm.weight"), golden_tensors()["language_model.model.norm.weight"])


def _swap(index):
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "b.safetensors"


def _forget(index):
    del index["weight_map"][next(iter(index["weight_map"]))]


def _invent(index):
    index["weight_map"]["ghost"] = "a.safetensors"


def _escape(index):
    index["weight_map"]["ghost"] = "../a.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_swap, "the index places .* in b.safetensors, but it is in a.safetensors"),
        (_forget, "in the files and not in the index"),
        (_invent, "ghost in a.safetensors, but no file has it"),
        (_escape, "not the name of a file"),
        (lambda index: index.pop("weight_map"), "weight_map"),
        (lambda index: index["weight_map"].update(ghost="c.safetensors"), "c.safetensors, which is missing"),
    ],
    ids=["a wrong file", "a tensor left out", "a tensor too many", "a path outside", "no map", "a missing shard"],
)
def test_a_wrong_index_is_refused(tmp_path, damage, message):
    folder, index = sharded(tmp_path)
    damage(index)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=message):
        HFFolder(folder)


def test_a_truncated_shard_is_refused_by_file(tmp_path):
    folder, _ = sharded(tmp_path)
    data = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(data[:-10])
    with pytest.raises(WeightsError, match="b.safetensors: truncated"):
        HFFolder(folder)


def test_shards_without_their_index_are_refused(tmp_path):
    folder, _ = sharded(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(WeightsError, match="2 safetensors files without their index"):
        HFFolder(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff"], ids=["empty", "cut", "a list", "bytes"])
def test_a_damaged_configuration_is_refused_by_file(tmp_path, text):
    folder = golden_folder(tmp_path)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises((WeightsError, ConfigError), match="config.json"):
        HFFolder(folder)


def test_pickled_weights_are_never_opened(tmp_path):
    golden_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="neither"):
        HFFolder(tmp_path)


def test_a_folder_that_does_not_exist_is_a_sentence(tmp_path):
    with pytest.raises(WeightsError, match="not a folder"):
        HFFolder(tmp_path / "nowhere")
