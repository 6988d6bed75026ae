"""A folder of shards is whole or visibly unfinished, whatever happens to the process that writes it."""

from __future__ import annotations

import errno
import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from k3train.errors import WeightsError
from k3train.weights import shards as shards_module
from k3train.weights.folder import INDEX, WORK, FolderWriter
from k3train.weights.reader import CheckpointFiles
from k3train.weights.shards import TensorSpec, plan_shards, read_header, write_shard

SPECS = [TensorSpec(f"t{i}", torch.bfloat16 if i % 2 else torch.float32, (i + 1, 8)) for i in range(10)]


def value(spec: TensorSpec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(spec.name[1:]))
    return torch.randn(spec.shape, generator=generator).to(spec.dtype)


def write_all(folder: Path, *, limit: int = 400, world: int = 1, source: str = "a") -> list[FolderWriter]:
    writers = [
        FolderWriter(folder, SPECS, identity={"source": source}, shard_bytes=limit, rank=rank, world=world)
        for rank in reversed(range(world))
    ]
    for writer in writers:
        for shard in writer.pending():
            writer.write(shard, value)
        writer.finish({"config.json": b"{}"})
    return writers


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir()) if p.is_file()}


def test_what_was_written_is_read_back_by_the_reference_library(tmp_path):
    write_all(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 3
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in SPECS)
    for spec in SPECS:
        tensor = load_file(tmp_path / index["weight_map"][spec.name])[spec.name]
        assert tensor.dtype == spec.dtype and torch.equal(tensor, value(spec))
    assert not (tmp_path / WORK).exists()


def test_no_shard_exceeds_the_limit_unless_one_tensor_does():
    plan = plan_shards(SPECS, 400)
    assert [s for shard in plan for s in shard.tensors] == SPECS
    for shard in plan:
        assert shard.nbytes <= 400 or len(shard.tensors) == 1
    assert plan[0].file == f"model-00001-of-{len(plan):05d}.safetensors"


def test_shards_can_be_kept_from_spanning_two_layers():
    plan = plan_shards(SPECS, 10**6, group=lambda spec: int(spec.name[1:]) // 4)
    assert [len(shard.tensors) for shard in plan] == [4, 4, 2]


@pytest.mark.parametrize("world", [2, 3, 7])
def test_any_number_of_processes_writes_the_same_bytes(tmp_path, world):
    write_all(tmp_path / "one")
    write_all(tmp_path / "many", world=world)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "many")


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, str(Path({here!r}).parents[2]))
from tests.weights.test_folder import SPECS, value
from k3train.weights.folder import FolderWriter
made = 0
def produce(spec):
    global made
    made += 1
    if made == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return value(spec)
writer = FolderWriter(Path({folder!r}), SPECS, identity={{"source": "a"}}, shard_bytes=400)
for shard in writer.pending():
    writer.write(shard, produce)
"""


def test_a_killed_export_is_refused_by_readers_and_resumes_to_the_same_bytes(tmp_path):
    script = KILLED.format(here=__file__, folder=str(tmp_path / "out"))
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    complete = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert complete, "killed before the first shard"
    assert not (tmp_path / "out" / INDEX).exists()
    with pytest.raises(WeightsError, match="unfinished.*again"):
        CheckpointFiles(tmp_path / "out")
    before = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in complete}
    write_all(tmp_path / "out")
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in complete} == before, (
        "rewrote finished shards"
    )
    write_all(tmp_path / "fresh")
    assert hashes(tmp_path / "out") == hashes(tmp_path / "fresh")


def interrupted(folder: Path, after: int = 3) -> None:
    writer = FolderWriter(folder, SPECS, identity={"source": "a"}, shard_bytes=400)
    for shard in writer.pending()[:after]:
        writer.write(shard, value)
    writer.close()


@pytest.mark.parametrize("world", [1, 3])
def test_an_interrupted_folder_can_be_continued_by_another_number_of_processes(tmp_path, world):
    interrupted(tmp_path / "out")
    write_all(tmp_path / "out", world=world)
    write_all(tmp_path / "fresh")
    assert hashes(tmp_path / "out") == hashes(tmp_path / "fresh")


def test_a_shard_that_was_damaged_after_the_interruption_is_written_again(tmp_path):
    interrupted(tmp_path / "out")
    victim = tmp_path / "out" / plan_shards(SPECS, 400)[1].file
    data = bytearray(victim.read_bytes())
    data[-3] ^= 1
    victim.write_bytes(data)
    write_all(tmp_path / "out")
    write_all(tmp_path / "fresh")
    assert hashes(tmp_path / "out") == hashes(tmp_path / "fresh")


def test_a_journal_line_cut_by_the_kill_counts_as_unwritten(tmp_path):
    interrupted(tmp_path / "out")
    journal = next((tmp_path / "out" / WORK).glob("journal-*"))
    journal.write_text(journal.read_text()[:-20])
    write_all(tmp_path / "out")
    write_all(tmp_path / "fresh")
    assert hashes(tmp_path / "out") == hashes(tmp_path / "fresh")


def test_writing_a_whole_folder_again_changes_nothing(tmp_path):
    write_all(tmp_path)
    times = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    write_all(tmp_path)
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == times


@pytest.mark.parametrize("finished", [True, False], ids=["a whole folder", "an unfinished folder"])
def test_a_folder_of_something_else_is_never_overwritten(tmp_path, finished):
    write_all(tmp_path) if finished else interrupted(tmp_path)
    with pytest.raises(WeightsError, match="something else.*another output"):
        write_all(tmp_path, source="b")


def test_safetensors_of_unknown_origin_are_never_mixed_in(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(WeightsError, match="unknown origin"):
        write_all(tmp_path)


def test_two_writers_of_the_same_part_exclude_each_other(tmp_path):
    first = FolderWriter(tmp_path, SPECS, identity={}, shard_bytes=400)
    with pytest.raises(WeightsError, match="another process is writing"):
        FolderWriter(tmp_path, SPECS, identity={}, shard_bytes=400)
    first.close()


def test_a_disk_that_fills_is_a_sentence_and_leaves_a_resumable_folder(tmp_path, monkeypatch):
    real, written = open, 0

    class Filling:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            nonlocal written
            written += len(data)
            if written > 1200:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

    def filling(path, mode="r", **options):
        file = real(path, mode, **options)
        return Filling(file) if str(path).endswith(".safetensors.part") else file

    monkeypatch.setattr(shards_module, "open", filling, raising=False)
    with pytest.raises(WeightsError, match="full.*run the same command again"):
        write_all(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.part"))
    assert not (tmp_path / "out" / INDEX).exists()
    assert list((tmp_path / "out").glob("*.safetensors")), "filled before the first shard"
    monkeypatch.undo()
    write_all(tmp_path / "out")
    write_all(tmp_path / "fresh")
    assert hashes(tmp_path / "out") == hashes(tmp_path / "fresh")


def test_too_little_space_is_refused_before_a_byte_is_written(tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(WeightsError, match="100 are free"):
        write_all(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_tensor_other_than_planned_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(WeightsError, match=r"t0.*float32 \[1, 8\].*bfloat16"):
        write_shard(tmp_path / "x.safetensors", SPECS[:1], lambda spec: value(spec).bfloat16())
    assert not list(tmp_path.iterdir())


def test_waiting_for_a_process_that_died_ends_with_the_missing_shard(tmp_path):
    writer = FolderWriter(tmp_path, SPECS, identity={}, shard_bytes=400, rank=0, world=2)
    for shard in writer.pending():
        writer.write(shard, value)
    with pytest.raises(WeightsError, match="model-00002-of"):
        writer.finish({}, patience=0.2)
    assert not (tmp_path / INDEX).exists()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: data[:5], "truncated"),
        (lambda data: data + b"\0", "too long"),
        (lambda data: (1 << 40).to_bytes(8, "little") + data[8:], "no safetensors"),
        (lambda data: data[:20] + b"\xff" + data[21:], "damaged"),
    ],
    ids=[
        "one byte short",
        "half a file",
        "less than a length",
        "a byte too many",
        "an absurd header",
        "a broken header",
    ],
)
def test_a_damaged_file_is_recognised_from_its_header_alone(tmp_path, damage, why):
    path = tmp_path / "x.safetensors"
    write_shard(path, SPECS[:3], value)
    assert read_header(path) == SPECS[:3]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(WeightsError, match=f"x.safetensors.*{why}"):
        read_header(path)
