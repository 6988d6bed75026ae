"""Folders out: bytes equal to the golden checkpoint, small files right, and readable by the clients that exist."""

from __future__ import annotations

import json
import weakref

import pytest
import torch

from k3train.config import hf as hf_config
from k3train.config.hf import SpecialTokens
from k3train.errors import ConfigError, WeightsError
from k3train.weights.hf import export_folder
from k3train.weights.reader import HFFolder
from k3train.weights.source import MappingSource

from .helpers import golden_config, golden_folder, golden_tensors, same_bytes, stored

TOKENS = SpecialTokens(124, 125, 127)


def export(source, output, **options):
    model = hf_config.from_hf(golden_config())
    options = {"identity": {"step": 1}, "tokens": TOKENS, "shard_bytes": 60_000, "max_positions": 4096} | options
    return export_folder(model, source, output, **options)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return HFFolder(golden_folder(tmp_path_factory.mktemp("golden")))


def test_the_golden_model_goes_in_and_comes_out_with_identical_bytes(golden, tmp_path):
    result = export(golden, tmp_path)
    written = stored(tmp_path)
    want = golden_tensors()
    assert written.keys() == want.keys()
    assert all(same_bytes(written[name], want[name]) for name in want)
    assert json.loads((tmp_path / "config.json").read_text()) == golden_config()
    assert (result.tensors, result.nbytes) == (len(want), sum(t.nbytes for t in want.values()))
    assert result.shards > 3


def test_packed_experts_come_out_as_the_bfloat16_they_decode_to(golden, tmp_path):
    packed = HFFolder(golden_folder(tmp_path / "in", packed=True))
    assert packed.packed and not golden.packed
    export(packed, tmp_path / "out")
    written, want = stored(tmp_path / "out"), golden_tensors()
    assert written.keys() == want.keys()
    assert all(same_bytes(written[name], want[name]) for name in want)


def test_a_state_dict_of_float32_master_weights_rounds_once_to_the_same_bytes(golden, tmp_path):
    state = {name: golden.read(name).float() for name in golden.names()}
    assert state["layers.1.moe.experts.w3"].shape == (8, 32, 32)
    export(MappingSource({**state, "final_norm.weight": lambda: state["final_norm.weight"]}), tmp_path)
    written, want = stored(tmp_path), golden_tensors()
    assert all(same_bytes(written[name], want[name]) for name in want)


def test_what_was_exported_reads_back_to_the_same_state(golden, tmp_path):
    export(golden, tmp_path)
    again = HFFolder(tmp_path)
    assert again.model.pattern == golden.model.pattern
    for name in golden.names():
        assert same_bytes(again.read(name), golden.read(name)), name


@pytest.mark.parametrize("world", [1, 3])
def test_the_largest_shard_stays_below_the_limit_for_any_number_of_processes(golden, tmp_path, world):
    # The parts are written one after the other here; the last process, of rank 0, finds them and writes the index.
    for rank in reversed(range(world)):
        export(golden, tmp_path, rank=rank, world=world)
    assert max(p.stat().st_size for p in tmp_path.glob("*.safetensors")) < 60_000 + 20_000
    HFFolder(tmp_path)


def test_the_files_beside_the_weights_let_a_client_start_and_stop(golden, tmp_path):
    transformers = pytest.importorskip("transformers")
    from k3data.tokenizer import Tokenizer

    trained = Tokenizer.train(["def f(x):\n    return x + 1\n" * 20], 300)
    trained.save(tmp_path / "tokenizer.json")
    export(golden, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", tokens=None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == config["text_config"]["eos_token_id"] == trained.eod
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == trained.eod
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=False)
    assert tokenizer("def f(x)")["input_ids"] == trained.encode("def f(x)")
    assert tokenizer.eos_token_id == trained.eod
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_the_exporter_holds_one_tensor_at_a_time(golden, tmp_path):
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    class Watched:
        def read(self, name, expert=None):
            nonlocal most
            tensor = golden.read(name, expert).clone()
            alive.add(tensor)
            most = max(most, len(alive))
            return tensor

    export(Watched(), tmp_path)
    assert most <= 2, "the one before may still wait for its place to be taken"


def test_processes_of_a_launcher_share_the_shards_and_the_last_one_finds_nothing_missing(golden, tmp_path):
    written = {}
    for rank in (2, 1, 0):
        before = set(tmp_path.glob("*.safetensors"))
        export(golden, tmp_path, rank=rank, world=3)
        written[rank] = set(tmp_path.glob("*.safetensors")) - before
    assert all(written.values())
    export(golden, tmp_path.with_name("alone"))
    alone = {p.name: p.read_bytes() for p in tmp_path.with_name("alone").glob("*.safetensors")}
    assert {p.name: p.read_bytes() for p in tmp_path.glob("*.safetensors")} == alone


def test_a_model_that_diverged_is_not_exported(golden, tmp_path):
    state = {name: golden.read(name) for name in golden.names()}
    state["layers.2.attention.o_proj.weight"] = state["layers.2.attention.o_proj.weight"].clone()
    state["layers.2.attention.o_proj.weight"][3, 4] = torch.inf
    with pytest.raises(WeightsError, match=r"layers.2.self_attn.o_proj.weight.*NaN or Inf"):
        export(MappingSource(state), tmp_path)


def test_a_state_without_a_tensor_of_its_configuration_is_refused_by_name(golden, tmp_path):
    state = {name: golden.read(name) for name in golden.names() if name != "layers.4.mlp_residual.query"}
    with pytest.raises(WeightsError, match=r"layers.4.mlp_residual.query"):
        export(MappingSource(state), tmp_path)


def test_the_wrong_format_is_refused_before_a_folder_exists(golden, tmp_path):
    with pytest.raises(ConfigError, match="kimi_linear cannot describe"):
        export(golden, tmp_path / "out", format="kimi_linear")
    assert not (tmp_path / "out").exists()
