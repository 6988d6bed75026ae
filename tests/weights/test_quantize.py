"""A folder in, the same folder with 4-bit experts out: bytes, report, resumption, and a client that reads it."""

from __future__ import annotations

import hashlib
import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from k3train.config.compose import compose
from k3train.errors import WeightsError
from k3train.weights import mxfp4, names
from k3train.weights.hf import export_folder
from k3train.weights.quantization_config import quantization_config
from k3train.weights.quantize import REPORT, Plan, QuantisedFolder, round_folder
from k3train.weights.quantizing import table
from k3train.weights.reader import HFFolder
from tests.weights.helpers import (
    GOLDEN,
    MOE,
    TINY,
    change_tensors,
    golden_config,
    golden_folder,
    golden_tensors,
    k3_quantization,
    same_bytes,
    stored,
)

CPU = torch.device("cpu")


def quantise(source: Path, output: Path, *, world: int = 1, device: torch.device = CPU, **plan) -> QuantisedFolder:
    for rank in reversed(range(world)):
        folder = QuantisedFolder(HFFolder(source), output, Plan(**plan), rank=rank, world=world)
        round_folder(folder, device)
        folder.finish()
    return folder


def off_the_grid(tensors: dict[str, torch.Tensor]) -> None:
    """Expert weights as training leaves them."""
    generator = torch.Generator().manual_seed(1)
    for name in tensors:
        if ".experts." in name and "shared" not in name:
            tensors[name] = (0.02 * torch.randn(tensors[name].shape, generator=generator)).bfloat16()


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir()) if p.is_file()}


@pytest.fixture
def trained(tmp_path):
    return change_tensors(golden_folder(tmp_path / "trained"), off_the_grid)


@pytest.mark.parametrize("scales", ["even", "mse"])
def test_a_four_bit_checkpoint_in_bfloat16_keeps_every_value(tmp_path, scales):
    source = golden_folder(tmp_path / "in")
    quantise(source, tmp_path / "out", scales=scales)
    written = stored(tmp_path / "out")
    for name, want in golden_tensors().items():
        if name in written:
            assert same_bytes(written[name], want), name
        else:
            got = mxfp4.dequantise(written[name + "_packed"], written[name + "_scale"])
            assert torch.equal(got, want), name  # a zero loses its sign, as in compressed-tensors
    assert {n for n in written if "packed" in n} == {
        n for n in load_file(TINY / "experts_mxfp4.safetensors") if "packed" in n
    }


def test_experts_that_are_packed_already_keep_their_bytes(tmp_path):
    source = golden_folder(tmp_path / "in", packed=True)
    quantise(source, tmp_path / "out", method="rtn", scales="mse")
    before, after = stored(source), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(same_bytes(after[name], before[name]) for name in before)
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    assert report["matrices_by_method"] == {"kept": 8 * 8 * 3}


def test_the_configuration_declares_what_was_packed_where_k3_declares_it(tmp_path, trained):
    quantise(trained, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["text_config"].pop("quantization_config") == k3_quantization() == quantization_config()
    assert config == golden_config()


def test_the_dequantised_format_holds_the_values_of_the_packed_one(tmp_path, trained):
    quantise(trained, tmp_path / "packed", scales="mse")
    quantise(trained, tmp_path / "plain", scales="mse", format="bf16")
    packed, plain = HFFolder(tmp_path / "packed"), HFFolder(tmp_path / "plain")
    assert packed.packed and not plain.packed
    assert "quantization_config" not in plain.config["text_config"]
    for name in packed.names():
        assert same_bytes(packed.read(name), plain.read(name)), name
    assert not torch.equal(plain.read("layers.1.moe.experts.w1"), HFFolder(trained).read("layers.1.moe.experts.w1"))
    quantise(tmp_path / "packed", tmp_path / "unpacked", format="bf16")
    assert all(same_bytes(a, stored(tmp_path / "plain")[n]) for n, a in stored(tmp_path / "unpacked").items())


@pytest.mark.parametrize("world", [2, 5])
def test_any_number_of_processes_writes_the_same_bytes(tmp_path, trained, world):
    quantise(trained, tmp_path / "one", shard_bytes=30_000)
    quantise(trained, tmp_path / "many", shard_bytes=30_000, world=world)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "many")
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > world


def test_one_matrix_at_a_time_is_held(tmp_path, trained, monkeypatch):
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most, real = 0, HFFolder.read

    def read(self, name, expert=None):
        nonlocal most
        tensor = real(self, name, expert).clone()
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(HFFolder, "read", read)
    quantise(trained, tmp_path / "out")
    assert 1 <= most <= 2, "the one before may still wait for its place to be taken"


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["even", "mse"])
def test_a_gpu_writes_the_bytes_of_a_cpu(tmp_path, trained, scales):
    quantise(trained, tmp_path / "cpu", scales=scales)
    quantise(trained, tmp_path / "gpu", scales=scales, device=torch.device("cuda"))
    cpu, gpu = hashes(tmp_path / "cpu"), hashes(tmp_path / "gpu")
    assert cpu.keys() == gpu.keys()
    assert [name for name in cpu if cpu[name] != gpu[name] and name != REPORT] == []  # its sums are rounded otherwise


def test_an_interrupted_quantisation_goes_on_and_ends_with_the_same_bytes_and_report(tmp_path, trained):
    folder = QuantisedFolder(HFFolder(trained), tmp_path / "out", Plan(shard_bytes=30_000))
    shards = folder.writer.pending()

    class Killed(BaseException):
        pass

    def stop(done, total, what):
        if done == len(shards) // 2:
            raise Killed

    with pytest.raises(Killed):
        round_folder(folder, CPU, stop)
    folder.writer.close()
    with pytest.raises(WeightsError, match="unfinished"):
        HFFolder(tmp_path / "out")
    quantise(trained, tmp_path / "out", shard_bytes=30_000)
    quantise(trained, tmp_path / "fresh", shard_bytes=30_000)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "fresh")


def test_another_plan_does_not_continue_an_interrupted_one(tmp_path, trained):
    folder = QuantisedFolder(HFFolder(trained), tmp_path / "out", Plan(shard_bytes=30_000))
    folder.writer.close()
    with pytest.raises(WeightsError, match="something else"):
        QuantisedFolder(HFFolder(trained), tmp_path / "out", Plan(shard_bytes=30_000, scales="mse"))


def test_the_report_names_every_matrix_and_layer_with_honest_numbers(tmp_path, trained):
    quantise(trained, tmp_path / "out")
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    assert len(report["matrices"]) == 8 * 8 * 3
    assert [line["layer"] for line in report["layers"]] == list(range(1, 9))
    one = report["matrices"][MOE.format(3) + "experts.7.w2.weight"]
    assert one["method"] == "rtn" and 17.5 < one["sqnr_db"] < 20.5 and one["suspicious"] is None
    assert report["all"]["sqnr_db"] == pytest.approx(19.0, abs=0.15)
    assert sum(report["all"]["scale_histogram"].values()) == report["all"]["groups"] == 8 * 8 * 3 * 32
    assert "quantisation-aware training" in report["note"] and "vLLM" in report["note"]
    shown = table(report)
    assert "19.0" in shown and shown.count("\n") >= 10


def test_an_expert_with_nan_stops_the_run_with_its_name(tmp_path):
    name = MOE.format(4) + "experts.3.w3.weight"
    source = change_tensors(golden_folder(tmp_path / "in"), lambda t: t[name].__setitem__((5, 9), float("nan")))
    with pytest.raises(WeightsError, match=r"layers.4.*experts.3.w3"):
        quantise(source, tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_the_source_is_never_its_own_output(tmp_path, trained):
    with pytest.raises(WeightsError, match="is the source"):
        QuantisedFolder(HFFolder(trained), trained, Plan())


class Tree(nn.Module):
    """Modules of the given dotted names."""

    def add(self, dotted: str, leaf: nn.Module) -> None:
        node: nn.Module = self
        *path, last = dotted.split(".")
        for name in path:
            if name not in node._modules:
                node.add_module(name, nn.Module())
            node = node._modules[name]
        node.add_module(last, leaf)


def linears(folder: HFFolder) -> Tree:
    """Every matrix of the model as an nn.Linear, the router and the residual queries too: the strictest client."""
    tree = Tree()
    for entry in folder.table.values():
        if entry.hf.endswith(".weight") and len(entry.hf_shape) == 2 and "embed_tokens" not in entry.hf:
            out, width = entry.hf_shape
            tree.add(entry.hf.removesuffix(".weight"), nn.Linear(width, out, bias=False, dtype=torch.bfloat16))
    return tree


@pytest.fixture
def alone(monkeypatch):
    """No process group, as in the client's own process: other tests of this one may have made a group, in which
    compressed-tensors puts every tensor into shared memory through a manager process, which a busy machine starts late.
    """
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)


@pytest.mark.usefixtures("alone")
def test_compressed_tensors_finds_exactly_the_experts_and_decodes_our_values(tmp_path, trained):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    quantise(trained, tmp_path / "out")
    folder = HFFolder(tmp_path / "out")
    declared = folder.config["text_config"]["quantization_config"]
    client = linears(folder)
    apply_quantization_config(client, QuantizationConfig.model_validate(declared), run_compressed=True)
    chosen = {name for name, module in client.named_modules() if hasattr(module, "quantization_scheme")}
    experts = {e.hf.removesuffix(".weight"): e for e in folder.table.values() if e.is_routed_expert}
    assert chosen == set(experts) and len(chosen) == 3 * 8 * 8
    compressor = ModelCompressor(quantization_config=QuantizationConfig.model_validate(declared))
    compressor.compress_model(client)
    tensors = stored(tmp_path / "out")
    for name in chosen:
        module = client.get_submodule(name)
        assert set(dict(module.named_parameters())) == {"weight_packed", "weight_scale"}
        for suffix in ("weight_packed", "weight_scale"):
            getattr(module, suffix).data.copy_(tensors[f"{name}.{suffix}"])
    compressor.decompress_model(client)
    for name, entry in experts.items():
        assert same_bytes(client.get_submodule(name).weight.data, folder.read(entry.ours, entry.expert)), name


@pytest.mark.usefixtures("alone")
def test_the_ignore_list_leaves_exactly_the_experts_of_the_whole_k3():
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = compose(["model=k3", "model.moe.experts=3", "model.moe.top_k=2", "model.pattern=KKKF F"]).model
    tree = Tree()
    with torch.device("meta"):
        for entry in names.entries(model):
            if entry.hf.endswith(".weight") and len(entry.hf_shape) == 2 and "embed_tokens" not in entry.hf:
                tree.add(entry.hf.removesuffix(".weight"), nn.Linear(entry.hf_shape[1], entry.hf_shape[0], bias=False))
    apply_quantization_config(tree, QuantizationConfig.model_validate(quantization_config()))
    chosen = {name for name, module in tree.named_modules() if hasattr(module, "quantization_scheme")}
    assert chosen == {e.hf.removesuffix(".weight") for e in names.entries(model) if e.is_routed_expert}
    released = json.loads((GOLDEN / "mxfp4" / "k3_quantization_config.json").read_text())
    assert set(released["ignore"]) < set(quantization_config()["ignore"])


def test_transformers_reads_our_bytes_as_the_layout_of_gpt_oss():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weight = torch.randn(2, 48, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    packed = mxfp4.quantise(weight)
    blocks = packed.packed.unflatten(-1, (-1, 16))
    theirs = convert_moe_packed_tensors(blocks, packed.scale, dtype=torch.bfloat16)
    assert torch.equal(theirs.transpose(1, 2), packed.dequantise())


def test_a_quantised_kimi_linear_declares_itself_at_the_root(tmp_path):
    from tests.weights.test_names import SMALL_LINEAR

    model = compose(SMALL_LINEAR).model
    generator = torch.Generator().manual_seed(3)

    class Random:
        def read(self, name, expert=None):
            entry = table_of[name, expert]
            return 0.02 * torch.randn(entry.shape, generator=generator)

    table_of = {(e.ours, e.expert): e for e in names.entries(model, "kimi_linear")}
    export_folder(model, Random(), tmp_path / "in", identity={})
    quantise(tmp_path / "in", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert HFFolder(tmp_path / "out").packed
