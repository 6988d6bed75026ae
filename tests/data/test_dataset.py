from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from k3data import manifest
from k3data.batch import sample_of
from k3data.dataset import TextDataset, open_corpus, prepare_collectively
from k3data.manifest import Manifest
from k3data.prepare import prepare
from k3train.errors import DataError
from k3train.platform import install
from tests.data.texts import write_jsonl

EOD = 0


@pytest.mark.parametrize(
    ("text", "starts", "mask"),
    [
        ([5, 6, 7, 8, 9], [], [1, 1, 1, 1]),
        ([5, EOD, 7, 8, 9], [2], [1, 0, 1, 1]),
        ([EOD, 6, 7, EOD, 9], [1], [0, 1, 1, 0]),
        ([5, 6, 7, 8, EOD], [], [1, 1, 1, 1]),
        ([EOD, EOD, EOD, 8, 9], [1, 2, 3], [0, 0, 0, 1]),
    ],
    ids=["one-document", "an-end-inside", "ends-at-both-borders", "the-end-as-last-label", "ends-in-a-row"],
)
def test_boundaries_follow_ends_and_nothing_is_learnt_across_them(
    text: list[int], starts: list[int], mask: list[int]
) -> None:
    sample = sample_of(np.array(text, np.uint16), EOD)
    assert sample.tokens.tolist() == text[:-1] and sample.labels.tolist() == text[1:]
    assert sample.starts.tolist() == starts
    assert sample.loss_mask.tolist() == mask
    assert (sample.tokens.dtype, sample.loss_mask.dtype) == (np.int64, np.float32)


def stream(data: Manifest, split: str) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(data.prefix(split))
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_an_epoch_holds_every_document_once(prepared: Manifest) -> None:
    """The samples of one pass, put back in the order they were cut, are the documents in some order."""
    dataset = TextDataset(prepared, "train", 32, seed=3)
    samples = [dataset.sample(i) for i in range(dataset.per_epoch)]
    # A sample's last label is the first token of the one that was cut after it.
    pieces = "".join(chr(1000 + t) for s in samples for t in s.tokens)
    total = sum(map(len, stream(prepared, "train")))
    assert len(samples) == (total - 1) // 32
    counts = np.bincount([ord(c) - 1000 for c in pieces], minlength=prepared.vocab_size)
    expected = np.bincount(np.concatenate(stream(prepared, "train")), minlength=prepared.vocab_size)
    assert (expected - counts).min() >= 0 and (expected - counts).sum() == total - 32 * len(samples)


def test_the_order_does_not_depend_on_how_long_the_run_is(prepared: Manifest) -> None:
    """Five steps planned and five hundred planned begin alike, over the borders of epochs too."""
    short = TextDataset(prepared, "train", 64, seed=3, samples=10)
    long = TextDataset(prepared, "train", 64, seed=3, samples=short.per_epoch * 3)
    for index in (0, 9, short.per_epoch - 1, short.per_epoch, 2 * short.per_epoch + 5):
        assert np.array_equal(short.sample(index).tokens, long.sample(index).tokens)


def test_epochs_beyond_those_on_disk_keep_their_order(prepared: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk = TextDataset(prepared, "train", 64, seed=3, samples=10_000)
    monkeypatch.setattr("k3data.dataset._EPOCHS_ON_DISK", 1)
    in_memory = TextDataset(prepared, "train", 64, seed=3, samples=10_000)
    assert len(on_disk._epochs) > 2 and len(in_memory._epochs) == 1
    for index in (5, on_disk.per_epoch + 5, 2 * on_disk.per_epoch + 5):
        assert np.array_equal(on_disk.sample(index).tokens, in_memory.sample(index).tokens)


def test_seeds_and_epochs_give_different_orders(prepared: Manifest) -> None:
    first, second = (TextDataset(prepared, "train", 64, seed=seed) for seed in (3, 4))
    assert not np.array_equal(first.sample(0).tokens, second.sample(0).tokens)
    assert not np.array_equal(first.sample(0).tokens, first.sample(first.per_epoch).tokens)


def test_held_out_samples_do_not_follow_the_seed_and_end(prepared: Manifest) -> None:
    first, second = (TextDataset(prepared, "valid", 64, seed=seed) for seed in (3, 4))
    assert first.samples == first.per_epoch > 5
    for index in range(first.per_epoch):
        assert np.array_equal(first.sample(index).tokens, second.sample(index).tokens)
    for outside in (-1, first.per_epoch):
        with pytest.raises(IndexError, match=f"sample {outside} of"):
            first.sample(outside)


def test_a_split_shorter_than_a_sequence_is_refused(prepared: Manifest) -> None:
    with pytest.raises(DataError, match=r"fewer than one sequence of 1000000.*train\.seq_length"):
        TextDataset(prepared, "train", 1_000_000)


def test_indices_go_to_the_cache_when_the_data_cannot_be_written(
    prepared: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3data.dataset.os.access", lambda path, mode: not str(path).startswith(prepared.folder))
    TextDataset(prepared, "train", 48)
    assert list(Path(os.environ["K3TRAIN_CACHE"], "index", prepared.key[:16]).glob("*.npy"))


def test_a_prepared_dataset_is_opened_by_its_prefix(prepared: Manifest) -> None:
    assert open_corpus([], prefix=prepared.prefix("train")).train == prepared.train


def _two_ranks(rank: int, folder: str) -> None:
    os.environ["K3TRAIN_CACHE"] = f"{folder}/cache"
    install()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    corpus = f"{folder}/a.jsonl"
    calls = []

    def make() -> Manifest:
        calls.append(rank)
        return prepare([corpus], vocab_size=300, workers=1, validation_fraction=0.2)

    data = prepare_collectively(make)
    assert calls == ([0] if rank == 0 else [])
    dataset = TextDataset(data, "train", 32, seed=1, samples=10)
    seen: list[object] = [None, None]
    dist.all_gather_object(seen, [dataset.sample(i).tokens.tolist() for i in range(dataset.per_epoch + 3)])
    assert seen[0] == seen[1]

    def fail() -> Manifest:
        raise DataError("no such corpus")

    with pytest.raises(DataError, match="no such corpus"):  # on both ranks
        prepare_collectively(fail)

    def lost() -> Manifest:
        return manifest.load(data.folder)

    if rank == 1:  # a rank whose node does not share the folder
        manifest_load, manifest.load = manifest.load, lambda path: manifest_load("/nowhere")  # type: ignore[assignment]
        with pytest.raises(DataError, match="does not see .*set K3TRAIN_CACHE"):
            prepare_collectively(lost)
    else:
        prepare_collectively(lost)
    dist.destroy_process_group()


def test_rank_0_prepares_and_all_read_the_same() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_jsonl(Path(folder, "a.jsonl"), 100)
        mp.spawn(_two_ranks, args=(folder,), nprocs=2)
