from __future__ import annotations

import json
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from k3data import manifest
from k3data.corpus import Report, find_sources, read_documents
from k3data.manifest import Manifest
from k3data.prepare import prepare, unigram_cross_entropy
from k3data.tokenizer import Tokenizer
from k3data.worker import Pool, Task
from k3train.errors import DataError, EnvironmentError_
from tests.data.texts import sentence, write_jsonl


def stored(data: Manifest, split: str) -> list[np.ndarray]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(data.prefix(split))
    return [np.array(dataset[i]) for i in range(len(dataset))]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "text.jsonl", 300)


def test_every_document_comes_back_from_the_files(prepared: Manifest) -> None:
    tokenizer = Tokenizer.load(prepared.tokenizer)
    texts = []
    for split in ("train", "valid"):
        for ids in stored(prepared, split):
            assert ids[-1] == prepared.eod and prepared.eod not in ids[:-1]
            texts.append(tokenizer.decode(ids[:-1].tolist()))
    sources = find_sources([prepared.inputs[0]], Report())
    expected = [d.text for source in sources for d in read_documents(source, "text", Report())]
    assert sorted(texts) == sorted(expected)


def test_the_manifest_counts_what_is_stored(prepared: Manifest) -> None:
    tokenizer = Tokenizer.load(prepared.tokenizer)
    for split, record in (("train", prepared.train), ("valid", prepared.valid)):
        documents = stored(prepared, split)
        assert record.documents == len(documents)
        assert record.tokens == sum(map(len, documents))
        assert record.text_bytes == sum(len(tokenizer.decode(ids[:-1].tolist()).encode()) for ids in documents)
    assert 30 < prepared.valid.documents < 90  # 10 % of 600, by the hash of their names
    assert manifest.load(prepared.folder).train == prepared.train
    assert manifest.load(Path(prepared.folder, "train")).folder == prepared.folder


def test_the_unigram_loss_is_that_of_the_counts(prepared: Manifest) -> None:
    counts = np.bincount(np.concatenate(stored(prepared, "train")), minlength=prepared.vocab_size) + 1
    targets = np.concatenate([ids[1:] for ids in stored(prepared, "valid")])
    expected = -np.log(counts / counts.sum())[targets].mean()
    assert prepared.unigram_nats == pytest.approx(expected, rel=1e-12)
    bits = expected * len(targets) / prepared.valid.text_bytes / math.log(2)
    assert prepared.bits_per_byte(expected) == pytest.approx(bits, rel=1e-12)


def test_without_targets_there_is_no_unigram_loss() -> None:
    assert unigram_cross_entropy(np.ones(4), np.zeros(4)) is None
    assert unigram_cross_entropy(np.zeros(4), np.array([1, 0, 0, 0])) == pytest.approx(math.log(4))


@pytest.mark.parametrize("workers", [2, 3])
def test_processes_write_the_bytes_of_a_single_one(tmp_path: Path, corpus: Path, workers: int) -> None:
    (tmp_path / "more").mkdir()
    for i in range(40):
        (tmp_path / "more" / f"{i}.txt").write_text(sentence(i) * (1 + i * 20))
    made = [
        prepare([str(corpus), str(tmp_path / "more")], output=tmp_path / f"out{n}", workers=n, vocab_size=400)
        for n in (1, workers)
    ]
    for name in ("train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer.json"):
        serial, parallel = (Path(data.folder, name).read_bytes() for data in made)
        assert serial == parallel, name


def test_tokenizing_processes_load_neither_torch_nor_megatron(tmp_path: Path, corpus: Path) -> None:
    Tokenizer.train([sentence(0)], 300).save(tmp_path / "tokenizer.json")
    source = find_sources([str(corpus)], Report())[0]
    task = Task((source,), str(tmp_path / "tokenizer.json"), "<|endoftext|>", "text", str(tmp_path / "out"), "uint16")
    with Pool(1) as pool:
        (result,) = pool.map([task])
    assert result.heavy_modules == ()
    assert len(result.lengths) == 300 and result.lengths.sum() * 2 == (tmp_path / "out").stat().st_size


def test_a_process_that_dies_is_reported(tmp_path: Path, corpus: Path) -> None:
    source = find_sources([str(corpus)], Report())[0]
    task = Task((source,), "unused", "<|endoftext|>", "text", str(tmp_path / "out"), "uint16")
    with Pool(1) as pool:
        pool._processes[0].kill()
        pool._processes[0].wait()
        with pytest.raises(EnvironmentError_, match="ended with status -9 while it read text.jsonl.*data.workers=1"):
            list(pool.map([task]))


def test_an_error_in_a_process_arrives_as_it_was_raised(tmp_path: Path, corpus: Path) -> None:
    source = find_sources([str(corpus)], Report())[0]
    task = Task((source,), "/nowhere.json", "<|endoftext|>", "text", str(tmp_path / "out"), "uint16")
    with Pool(1) as pool, pytest.raises(DataError, match="/nowhere.json does not exist"):
        list(pool.map([task]))


# -- the cache ---------------------------------------------------------------------------------------------------


def test_the_second_run_reuses_the_first(corpus: Path) -> None:
    first, second = (prepare([str(corpus)], vocab_size=400, workers=1) for _ in range(2))
    assert not first.reused and second.reused
    assert (first.folder, first.train) == (second.folder, second.train)
    assert first.folder.startswith(os.environ["K3TRAIN_CACHE"])


def test_the_key_follows_contents_not_places(tmp_path: Path, corpus: Path) -> None:
    first = prepare([str(corpus)], vocab_size=400, workers=1)
    elsewhere = tmp_path / "elsewhere" / "text.jsonl"
    elsewhere.parent.mkdir()
    shutil.copy(corpus, elsewhere)
    assert prepare([str(elsewhere)], vocab_size=400, workers=1).reused
    with open(elsewhere, "a") as out:
        out.write(json.dumps({"text": "one more"}) + "\n")
    changed = prepare([str(elsewhere)], vocab_size=400, workers=1)
    assert not changed.reused and changed.key != first.key


@pytest.mark.parametrize("setting", [{"vocab_size": 410}, {"validation_fraction": 0.3}, {"text_field": "id"}])
def test_the_key_follows_the_settings(corpus: Path, setting: dict[str, object]) -> None:
    lines = [json.dumps({"text": sentence(i), "id": sentence(i + 1000)}) for i in range(50)]
    corpus.write_text("\n".join(lines))
    first = prepare([str(corpus)], vocab_size=400, workers=1)
    options = {"vocab_size": 400, **setting}
    second = prepare([str(corpus)], workers=1, **options)  # type: ignore[arg-type]
    assert not second.reused and second.key != first.key


def test_a_damaged_entry_is_made_again(corpus: Path) -> None:
    first = prepare([str(corpus)], vocab_size=400, workers=1)
    Path(first.folder, "train.idx").unlink()
    second = prepare([str(corpus)], vocab_size=400, workers=1)
    assert not second.reused and Path(second.folder, "train.idx").is_file()


def test_two_runs_at_once_make_it_once(corpus: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda _: prepare([str(corpus)], vocab_size=400, workers=1), range(2)))
    assert sorted(data.reused for data in made) == [False, True]


def test_a_failed_run_leaves_nothing_behind(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("disk on fire")

    monkeypatch.setattr("k3data.prepare._write", fail)
    with pytest.raises(RuntimeError, match="disk on fire"):
        prepare([str(corpus)], vocab_size=400, workers=1)
    left = list(Path(os.environ["K3TRAIN_CACHE"], "data").iterdir())
    assert [path.suffix for path in left] == [".lock"]


def test_what_a_killed_run_left_is_cleared_away(corpus: Path) -> None:
    first = prepare([str(corpus)], vocab_size=400, workers=1)
    shutil.rmtree(first.folder)
    left = Path(first.folder).parent / f".{Path(first.folder).name}.1.part"
    left.mkdir()
    (left / "shard-000000").write_text("half")
    prepare([str(corpus)], vocab_size=400, workers=1)
    assert not left.exists()


def test_the_folder_is_as_readable_as_any_other(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    data = prepare([str(corpus)], vocab_size=400, workers=1)
    assert Path(data.folder).stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_large_files_are_hashed_once(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3data.prepare._REMEMBERED", 100)
    prepare([str(corpus)], vocab_size=400, workers=1)
    memo = json.loads(Path(os.environ["K3TRAIN_CACHE"], "hashes.json").read_text())
    assert [key.split(":")[0] for key in memo] == [str(corpus.resolve())]
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("read again"))
    assert prepare([str(corpus)], vocab_size=400, workers=1).reused


# -- the split ---------------------------------------------------------------------------------------------------


def test_few_documents_still_hold_one_out(tmp_path: Path) -> None:
    data = prepare([str(write_jsonl(tmp_path / "a.jsonl", 3))], vocab_size=300, workers=1, validation_fraction=1e-9)
    assert (data.train.documents, data.valid.documents) == (2, 1)


def test_a_single_document_is_cut_at_a_line_end(tmp_path: Path) -> None:
    text = "".join(sentence(i) for i in range(200))
    (tmp_path / "book.txt").write_text(text)
    data = prepare([str(tmp_path / "book.txt")], vocab_size=400, workers=1, validation_fraction=0.1)
    tokenizer = Tokenizer.load(data.tokenizer)
    (train,), (valid,) = stored(data, "train"), stored(data, "valid")
    pieces = [tokenizer.decode(ids[:-1].tolist()) for ids in (train, valid)]
    assert "".join(pieces) == text and pieces[0].endswith("\n")
    assert 0.05 < len(pieces[1]) / len(text) < 0.15


def test_nothing_is_held_out_when_nothing_is_asked_for(corpus: Path) -> None:
    data = prepare([str(corpus)], vocab_size=400, workers=1, validation_fraction=0)
    assert data.valid.documents == 0 and data.unigram_nats is None and data.train.documents == 300


def test_a_document_stays_on_its_side_when_others_come(tmp_path: Path, corpus: Path) -> None:
    first = prepare([str(corpus)], vocab_size=400, workers=1, validation_fraction=0.2)
    held = {Tokenizer.load(first.tokenizer).decode(ids[:-1].tolist()) for ids in stored(first, "valid")}
    write_jsonl(tmp_path / "more.jsonl", 100, seed=9)
    both = prepare([str(corpus), str(tmp_path / "more.jsonl")], vocab_size=400, workers=1, validation_fraction=0.2)
    later = {Tokenizer.load(both.tokenizer).decode(ids[:-1].tolist()) for ids in stored(both, "valid")}
    assert held < later


# -- tokenizers --------------------------------------------------------------------------------------------------


def test_a_given_tokenizer_is_used_and_copied(tmp_path: Path, corpus: Path) -> None:
    tokenizer = Tokenizer.train((sentence(i) for i in range(50)), 350)
    tokenizer.save(tmp_path / "mine.json")
    data = prepare([str(corpus)], str(tmp_path / "mine.json"), workers=1)
    assert (data.vocab_size, data.eod) == (tokenizer.vocab_size, tokenizer.eod)
    assert Tokenizer.load(data.tokenizer).inner.to_str() == tokenizer.inner.to_str()


def test_large_vocabularies_are_stored_in_32_bits(tmp_path: Path, corpus: Path) -> None:
    tokenizer = Tokenizer.train([sentence(0)], 300)
    tokenizer.inner.add_tokens([f"<{i}>" for i in range(66_000)])
    tokenizer.save(tmp_path / "big.json")
    data = prepare([str(corpus)], str(tmp_path / "big.json"), workers=1)
    assert stored(data, "train")[0].dtype == np.int32


# -- what is refused ---------------------------------------------------------------------------------------------


def test_troubles_reach_the_manifest(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", 20)
    with open(path, "a") as out:
        out.write("{broken\n" + json.dumps({"text": ""}) + "\n")
    data = prepare([str(path)], vocab_size=300, workers=1)
    assert data.report == {"empty": 1, "invalid_json": 1}
    assert "1 empty, 1 invalid json" in data.summary()
    assert manifest.load(data.folder).examples == data.examples != ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "1 files and no text in them"),
        ("{broken\n", "gave no usable document: 1 invalid_json"),
        ('{"body": "x"}\n', "set data.text_field to one of their fields"),
        ('{"text": " "}\n', "gave no usable document: 1 empty"),
    ],
    ids=["empty-file", "broken-json", "another-field", "only-white-space"],
)
def test_inputs_without_a_document_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        prepare([str(tmp_path / "a.jsonl")], vocab_size=300, workers=1)


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_a_fraction_outside_its_range_is_refused(corpus: Path, fraction: float) -> None:
    with pytest.raises(DataError, match="validation_fraction="):
        prepare([str(corpus)], validation_fraction=fraction)


def test_an_output_of_other_contents_is_refused(tmp_path: Path, corpus: Path) -> None:
    prepare([str(corpus)], output=tmp_path / "out", vocab_size=400, workers=1)
    assert prepare([str(corpus)], output=tmp_path / "out", vocab_size=400, workers=1).reused
    with pytest.raises(DataError, match="holds a dataset of other contents or settings"):
        prepare([str(corpus)], output=tmp_path / "out", vocab_size=410, workers=1)


def test_an_output_that_holds_something_else_is_left_alone(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="exists and is no prepared dataset"):
        prepare([str(corpus)], output=tmp_path / "out", vocab_size=400, workers=1)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


def test_a_cache_that_cannot_be_written_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="set K3TRAIN_CACHE"):
        prepare([str(corpus)], cache=tmp_path / "file")


@pytest.mark.parametrize(
    ("damage", "message"),
    [("manifest.json", "is no prepared dataset"), ("train.bin", "lacks train.bin"), ("format", "has format 0")],
)
def test_a_folder_that_is_not_whole_is_refused(prepared: Manifest, tmp_path: Path, damage: str, message: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(prepared.folder, folder)
    if damage == "format":
        record = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**record, "format": 0}))
    else:
        (folder / damage).unlink()
    with pytest.raises(DataError, match=message):
        manifest.load(folder)


def test_progress_counts_up_to_the_whole(corpus: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    prepare([str(corpus)], vocab_size=400, workers=1, progress=lambda *call: calls.append(call))
    stages = list(dict.fromkeys(stage for stage, _, _ in calls))
    assert stages == ["reading", "tokenizer", "tokens", "writing"]
    for name in stages:
        done = [d for stage, d, _ in calls if stage == name]
        totals = {t for stage, _, t in calls if stage == name}
        assert done == sorted(done) and totals == {done[-1]}
