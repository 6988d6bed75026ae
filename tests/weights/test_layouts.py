"""Checkpoints of any layout leave as the same bytes, and a folder enters any layout as the same weights."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import pytest
import torch

from k3train.errors import CheckpointError, WeightsError
from k3train.weights.checkpoint import CheckpointSource
from k3train.weights.commands import tensors_left_out
from k3train.weights.hf import export_folder
from k3train.weights.opening import open_weights
from k3train.weights.reader import HFFolder
from tests.parallel.pool import pool
from tests.weights.helpers import stored

LAYOUTS = {
    "tensor 2": (2, {"tensor": 2}),
    "tensor 2 x data 2 with experts over 4": (4, {"tensor": 2, "expert": 4}),
    "pipeline 2 in 2 virtual stages": (2, {"pipeline": 2, "virtual": 2}),
    "expert 2 x pipeline 2": (4, {"pipeline": 2, "expert": 2}),
    "context 2": (2, {"context": 2}),
}


def export(run: Path, output: Path, **options) -> dict[str, str]:
    opened = open_weights(run, lambda text: None)
    export_folder(opened.model, opened.source, output, identity={"run": "tiny"}, shard_bytes=40_000, **options)
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(output.iterdir())}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A run of one process, and what it exports to."""
    folder = tmp_path_factory.mktemp("single")
    pool(1).run("tests.weights.layout_cases:save_run", sizes={}, run=str(folder / "run"))
    return folder / "run", folder / "hf", export(folder / "run", folder / "hf")


@pytest.mark.parametrize(("world", "sizes"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_checkpoint_of_any_layout_exports_to_the_same_bytes(single, tmp_path, world, sizes):
    pool(world).run("tests.weights.layout_cases:save_run", sizes=sizes, run=str(tmp_path / "run"))
    assert export(tmp_path / "run", tmp_path / "hf") == single[2]


@pytest.mark.parametrize(("world", "sizes"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_folder_enters_any_layout_as_the_weights_it_holds(single, world, sizes):
    loaded = pool(world).run("tests.weights.layout_cases:load_folder", sizes=sizes, folder=str(single[1]))[0]
    folder = HFFolder(single[1])
    assert set(loaded) == set(folder.names())
    for name, tensor in loaded.items():
        assert torch.equal(tensor, folder.read(name).float()), name


def test_a_checkpoint_of_one_layout_enters_another_without_a_folder_between(single):
    loaded = pool(2).run("tests.weights.layout_cases:load_folder", sizes={"tensor": 2}, folder=str(single[0]))[0]
    source = open_weights(single[0], lambda text: None).source
    for name, tensor in loaded.items():
        assert torch.equal(tensor, source.read(name)), name


def test_one_expert_is_read_without_the_others(single):
    source = open_weights(single[0], lambda text: None).source
    assert torch.equal(source.read("layers.2.moe.experts.w2", 7), source.read("layers.2.moe.experts.w2")[7])
    assert len(stored(single[1])) == len(HFFolder(single[1]).table)


def test_a_configuration_of_another_model_is_refused_by_a_tensor(single, tmp_path):
    opened = open_weights(single[0], lambda text: None)
    opened.model.kda.output_gate = "low_rank"
    with pytest.raises(WeightsError, match=r"g_a_proj"):
        export_folder(opened.model, opened.source, tmp_path / "out", identity={})


def test_weights_that_the_configuration_does_not_have_are_not_left_behind_silently(single):
    opened = open_weights(single[0], lambda text: None)
    assert tensors_left_out(opened, "auto") == []
    opened.model.mla.output_gate = False
    with pytest.raises(WeightsError, match=r"layers.3.attention.g_proj.weight \(3 such tensors\)"):
        tensors_left_out(opened, "auto")


def test_a_damaged_checkpoint_is_refused_before_anything_is_written(single, tmp_path):
    import shutil

    shutil.copytree(single[0], tmp_path / "run")
    file = next((tmp_path / "run" / "checkpoints").rglob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        open_weights(tmp_path / "run", lambda text: None)


def test_a_table_of_chunks_that_asks_for_code_is_not_loaded(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("pwned",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="print"):
        CheckpointSource(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"not a pickle"], ids=["empty", "cut", "text"])
def test_a_damaged_table_of_chunks_is_refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="metadata"):
        CheckpointSource(tmp_path)


def test_a_folder_that_is_nothing_of_ours_is_a_sentence(tmp_path):
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        open_weights(tmp_path)
    with pytest.raises(WeightsError, match="neither a run folder"):
        open_weights(tmp_path / "nowhere")
