from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from k3data.batch import Batch, Sample, pack
from k3data.dataset import TextDataset
from k3data.loader import GlobalBatchLoader, evaluation_batches, evaluation_steps
from k3data.manifest import Manifest


class Numbered:
    """Sample i is four tokens 10*i ... 10*i+3, with a document border after the first when i is odd."""

    def __init__(self, samples: int | None = None) -> None:
        self.samples = samples
        self.read: list[int] = []

    def sample(self, index: int) -> Sample:
        self.read.append(index)
        tokens = np.arange(4, dtype=np.int64) + 10 * index
        starts = np.array([1] if index % 2 else [], np.int64)
        return Sample(tokens, tokens + 1, np.ones(4, np.float32), starts)


def seen(batches: Iterator[Batch]) -> list[int]:
    """The sample numbers of batches, in order."""
    return [int(t) // 10 for batch in batches for t in batch.tokens[::4]]


def test_a_batch_is_one_flat_stream() -> None:
    batch = pack([Numbered().sample(i) for i in (2, 3)])
    assert batch.tokens.tolist() == [20, 21, 22, 23, 30, 31, 32, 33]
    assert batch.labels.tolist() == [21, 22, 23, 24, 31, 32, 33, 34]
    assert batch.cu_seqlens.tolist() == [0, 4, 5, 8] and batch.max_seqlen == 4
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert batch.loss_mask.dtype == torch.float32 and batch.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 2), (8, 1)])
def test_the_samples_of_a_step_do_not_depend_on_how_they_are_shared(micro: int, dp: int) -> None:
    count = 8 // (micro * dp)
    loaders = [
        GlobalBatchLoader(Numbered(), micro_batch_size=micro, num_microbatches=count, dp_rank=rank, dp_size=dp)
        for rank in range(dp)
    ]
    assert loaders[0].global_batch == 8
    for consumed in (0, 8, 12):  # 12: the batch was smaller before
        samples = [seen(loader.batches(consumed)) for loader in loaders]
        assert sorted(sum(samples, [])) == list(range(consumed, consumed + 8))
    # Rank r of micro-batch m reads consumed + (m * dp + r) * b + j.
    assert loaders[-1].indices(100, 0) == [100 + (dp - 1) * micro + j for j in range(micro)]


@pytest.mark.parametrize("prefetch", [False, True], ids=["in-line", "reading-ahead"])
def test_a_run_resumes_at_any_sample(prefetch: bool) -> None:
    def run(start: int, steps: int) -> list[list[int]]:
        loader = GlobalBatchLoader(Numbered(), micro_batch_size=1, num_microbatches=3, prefetch=prefetch)
        out = [seen(loader.batches(start + 3 * step)) for step in range(steps)]
        loader.close()
        return out

    straight = run(0, 6)
    assert straight == run(0, 2) + run(6, 4)
    assert straight[5] == [15, 16, 17]


def test_reading_ahead_reads_the_next_step_and_forgets_a_wrong_guess() -> None:
    dataset = Numbered()
    loader = GlobalBatchLoader(dataset, micro_batch_size=1, num_microbatches=2, prefetch=True)
    assert seen(loader.batches(0)) == [0, 1]
    assert seen(loader.batches(10)) == [10, 11]  # a rollback or a jump
    assert seen(loader.batches(12)) == [12, 13]
    assert seen(loader.batches(14, num_microbatches=3)) == [14, 15, 16]  # a larger batch
    loader.close()


def test_skipped_samples_are_left_out_and_the_rest_moves_up() -> None:
    loader = GlobalBatchLoader(Numbered(), micro_batch_size=1, num_microbatches=4, skip=[2, 3, 6, 100, 2])
    assert seen(loader.batches(0)) == [0, 1, 4, 5]
    assert seen(loader.batches(4)) == [7, 8, 9, 10]
    assert loader.indices(95, 0) == [98] and loader.indices(97, 0) == [101]


@pytest.mark.parametrize(
    "options",
    [{"dp_rank": 2, "dp_size": 2}, {"micro_batch_size": 0}, {"num_microbatches": 0}],
    ids=["rank-outside", "no-sequence", "no-micro-batch"],
)
def test_impossible_sizes_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        GlobalBatchLoader(Numbered(), **{"micro_batch_size": 1, "num_microbatches": 1, **options})


@pytest.mark.parametrize(("micro", "dp"), [(1, 1), (2, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("available", [None, 5], ids=["endless", "fewer-than-asked"])
def test_evaluation_counts_the_same_samples_for_any_sharing(micro: int, dp: int, available: int | None) -> None:
    counted = []
    for rank in range(dp):
        options = {"micro_batch_size": micro, "dp_size": dp}
        batches = list(evaluation_batches(Numbered(available), 7, dp_rank=rank, **options))
        assert len(batches) == evaluation_steps(Numbered(available), 7, **options)
        assert all(len(batch.tokens) == 4 * micro for batch in batches)
        counted += [int(t) // 10 for batch in batches for t in batch.tokens[batch.loss_mask > 0][::4]]
    assert sorted(counted) == list(range(available or 7))


def test_batches_of_text_respect_documents(prepared: Manifest) -> None:
    dataset = TextDataset(prepared, "train", 64, seed=1)
    loader = GlobalBatchLoader(dataset, micro_batch_size=3, num_microbatches=2)
    for batch in loader.batches(0):
        tokens, bounds = batch.tokens.tolist(), batch.cu_seqlens.tolist()
        expected = {0, 64, 128, 192} | {i + 1 for i, t in enumerate(tokens) if t == prepared.eod}
        assert bounds == sorted(expected)
        assert [m == 0 for m in batch.loss_mask.tolist()] == [t == prepared.eod for t in tokens]
        inside = [i for i in range(191) if (i + 1) % 64]
        assert all(batch.labels[i] == batch.tokens[i + 1] for i in inside)
        assert batch.max_seqlen == max(np.diff(bounds))


@pytest.mark.gpu
def test_a_gpu_gets_the_batches_of_the_cpu(prepared: Manifest) -> None:
    dataset = TextDataset(prepared, "train", 64, seed=1)
    options = {"micro_batch_size": 2, "num_microbatches": 2}
    cpu = GlobalBatchLoader(dataset, **options)
    gpu = GlobalBatchLoader(dataset, device="cuda", **options)
    for consumed in (0, 4, 8):
        for here, there in zip(cpu.batches(consumed), gpu.batches(consumed), strict=True):
            assert there.tokens.is_cuda and torch.equal(here.tokens, there.tokens.cpu())
            assert torch.equal(here.cu_seqlens, there.cu_seqlens.cpu())
            assert torch.equal(here.loss_mask, there.loss_mask.cpu())
    gpu.close()
