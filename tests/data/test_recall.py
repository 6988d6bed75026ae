from __future__ import annotations

import numpy as np
import pytest

from k3data.batch import Sample, pack
from k3data.loader import GlobalBatchLoader
from k3data.recall import (
    ASK,
    END,
    FORGET,
    HELD_OUT,
    NOISE,
    TASKS,
    RecallDataset,
    RecallTask,
    parse_task,
    recall_accuracy,
)
from k3train.errors import DataError

ALL = [
    RecallTask("multi_query", pairs=8),
    RecallTask("overwrite", pairs=4, rewrites=5),
    RecallTask("needle", pairs=2, distance=40),
    RecallTask("forgetting", pairs=4, stale=12),
    RecallTask("overwrite", pairs=8, rewrites=4, easiest=0.25),
]
ids = [f"{task.kind}-{'mixed' if task.easiest < 1 else 'fixed'}" for task in ALL]


def episodes(sample: Sample) -> list[tuple[list[int], list[int]]]:
    """(tokens, positions with a loss) of every episode; the filling is left out."""
    bounds = [0, *sample.starts.tolist(), len(sample.tokens)]
    out = []
    for a, b in zip(bounds, bounds[1:], strict=False):
        tokens = sample.tokens[a:b].tolist()
        if any(tokens):
            out.append((tokens, np.flatnonzero(sample.loss_mask[a:b]).tolist()))
    return out


@pytest.mark.parametrize("task", ALL, ids=ids)
def test_an_oracle_with_a_dictionary_answers_everything(task: RecallTask) -> None:
    """Reading an episode from left to right, the last value seen after a key is the answer to it."""
    dataset = RecallDataset(task, 256, seed=1)
    for index in range(20):
        sample = dataset.sample(index)
        found = episodes(sample)
        assert found
        for tokens, asked in found:
            ask = tokens.index(ASK)
            assert tokens[-1] == END and END not in tokens[:-1]
            assert asked == list(range(ask + 1, len(tokens) - 1, 2))
            memory: dict[int, int] = {}
            start = tokens.index(FORGET) + 1 if FORGET in tokens else 0
            position = start
            while position < ask and tokens[position] not in NOISE:
                memory[tokens[position]] = tokens[position + 1]
                position += 2
            assert {tokens[p]: tokens[p + 1] for p in asked} == memory
            assert all(t >= dataset.values_first for t in memory.values())


@pytest.mark.parametrize("task", ALL, ids=ids)
def test_labels_are_the_next_tokens_and_only_answers_are_learnt(task: RecallTask) -> None:
    dataset = RecallDataset(task, 256, seed=1)
    sample = dataset.sample(3)
    assert np.array_equal(sample.labels[:-1], sample.tokens[1:])
    learnt = sample.labels[sample.loss_mask > 0]
    assert len(learnt) and learnt.min() >= dataset.values_first and learnt.max() < dataset.vocab_size
    keys = sample.tokens[sample.loss_mask > 0]
    assert dataset.keys_first <= keys.min() and keys.max() < dataset.values_first


def test_episodes_have_the_length_they_claim() -> None:
    for task in ALL[:4]:
        for tokens, _ in episodes(RecallDataset(task, 256).sample(0)):
            assert len(tokens) == task.length


def test_overwrite_writes_each_key_again_and_again() -> None:
    tokens, _ = episodes(RecallDataset(ALL[1], 256).sample(0))[0]
    written = tokens[: tokens.index(ASK) : 2]
    assert sorted(written.count(key) for key in set(written)) == [5] * 4
    assert written != sorted(written)


def test_forgetting_never_asks_for_stale_keys() -> None:
    tokens, asked = episodes(RecallDataset(ALL[3], 256).sample(0))[0]
    stale = tokens[: tokens.index(FORGET) : 2]
    assert len(set(stale)) == 12 and not set(stale) & {tokens[p] for p in asked}


def test_a_needle_lies_behind_the_noise() -> None:
    tokens, asked = episodes(RecallDataset(ALL[2], 256).sample(0))[0]
    assert sum(t in NOISE for t in tokens) == 40 and len(asked) == 2


def test_mixed_sizes_vary_between_their_limits() -> None:
    dataset = RecallDataset(ALL[4], 256, seed=2)
    counts = {len(asked) for index in range(40) for _, asked in episodes(dataset.sample(index))}
    assert counts == set(range(2, 9))


@pytest.mark.parametrize("kind", TASKS)
def test_samples_depend_on_seed_stream_and_index_alone(kind: str) -> None:
    task = RecallTask(kind, pairs=4)

    def tokens(index: int, **options: int) -> list[int]:
        return RecallDataset(task, 128, **options).sample(index).tokens.tolist()

    first = RecallDataset(task, 128, seed=5)
    first.sample(9)  # what was read before does not matter
    assert first.sample(7).tokens.tolist() == tokens(7, seed=5)
    assert tokens(7, seed=5) != tokens(8, seed=5)
    assert tokens(7, seed=5) != tokens(7, seed=6)
    assert tokens(7, seed=5) != tokens(7, seed=5, stream=HELD_OUT)


def test_batches_begin_a_document_at_every_episode() -> None:
    dataset = RecallDataset(RecallTask("multi_query", pairs=4), 64)
    batch = next(GlobalBatchLoader(dataset, micro_batch_size=2, num_microbatches=1).batches(0))
    assert batch.tokens.shape == (128,) and batch.cu_seqlens.tolist() == [0, 18, 36, 54, 64, 82, 100, 118, 128]
    assert batch.loss_mask.sum() == 2 * 3 * 4


def test_accuracy_counts_answers_only() -> None:
    batch = pack([RecallDataset(RecallTask("multi_query", pairs=4), 64).sample(0)])
    assert recall_accuracy(batch.labels, batch) == (12, 12)
    wrong = batch.labels.clone()
    wrong[batch.loss_mask == 0] = -1
    wrong[int(batch.loss_mask.nonzero()[0])] += 1
    assert recall_accuracy(wrong, batch) == (11, 12)


def test_the_chance_level_is_uniform_over_values() -> None:
    dataset = RecallDataset(RecallTask("multi_query", pairs=4), 64, vocab_size=NOISE.stop + 200)
    assert dataset.chance_nats == pytest.approx(np.log(100))


def test_a_task_is_read_from_its_name() -> None:
    assert parse_task("recall:needle,pairs=1,distance=500") == RecallTask("needle", pairs=1, distance=500)
    assert parse_task("recall:multi_query,easiest=0.5") == RecallTask("multi_query", easiest=0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recall:overwritten", "did you mean 'overwrite'"),
        ("recall:needle,length=3", "'length=3' is not NAME=NUMBER with NAME one of pairs"),
        ("recall:needle,pairs", "'pairs' is not NAME=NUMBER"),
        ("recall:needle,pairs=many", "pairs takes a number \\(int\\), not 'many'"),
        ("recall:needle,pairs=0", "pairs of at least 1, got 0"),
        ("recall:needle,distance=-1", "distance of at least 0, got -1"),
        ("recall:needle,easiest=2", r"easiest in \(0, 1\], got 2"),
    ],
)
def test_a_wrong_name_is_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_task(text)


def test_an_episode_longer_than_the_sequence_is_refused() -> None:
    with pytest.raises(DataError, match="takes 66 tokens, more than train.seq_length=65"):
        RecallDataset(RecallTask("multi_query", pairs=16), 65)


def test_a_vocabulary_with_too_few_keys_is_refused() -> None:
    with pytest.raises(DataError, match="leaves 16 keys, fewer than the 17.*give 101 or more"):
        RecallDataset(RecallTask("multi_query", pairs=17), 128, vocab_size=100)


def test_an_index_outside_is_refused() -> None:
    dataset = RecallDataset(RecallTask("multi_query", pairs=4), 64, samples=3)
    for index in (-1, 3):
        with pytest.raises(IndexError):
            dataset.sample(index)
