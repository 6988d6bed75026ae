"""The micro-batches of a step, for one data-parallel rank.

Micro-batch m of rank r of the step that begins after `consumed` samples holds the global samples
`consumed + (m * dp_size + r) * b + j`, j < b. So a checkpoint needs one number, and the data-parallel size may change
when a run resumes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from k3data.batch import Batch, Sample, pack
from k3data.dataset import SampleSource


class GlobalBatchLoader:
    """Batches as a pure function of the number of samples consumed; the loader keeps no position of its own."""

    def __init__(
        self,
        dataset: SampleSource,
        *,
        micro_batch_size: int,
        num_microbatches: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        device: torch.device | str = "cpu",
        prefetch: bool | None = None,
        skip: Collection[int] = (),
    ) -> None:
        """
        micro_batch_size: sequences b of a micro-batch.
        num_microbatches: micro-batches a rank sees in a step; the global batch is b * num_microbatches * dp_size.
        device: where batches are put; a GPU gets them through page-locked memory, without waiting.
        prefetch: read the next step in a thread while this one computes; None does so for a GPU only.
        skip: samples of the dataset's order to leave out, as after a batch that broke a run; those behind move up.
        """
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank={dp_rank} must lie in [0, dp_size={dp_size})")
        if micro_batch_size < 1 or num_microbatches < 1:
            raise ValueError(f"{micro_batch_size=} and {num_microbatches=} must be at least 1")
        self.dataset = dataset
        self.micro_batch_size, self.num_microbatches = micro_batch_size, num_microbatches
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.device = torch.device(device)
        self._skip = sorted(set(skip))
        self._on_gpu = self.device.type != "cpu"
        wanted = self._on_gpu if prefetch is None else prefetch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="k3data") if wanted else None
        self._ahead: dict[tuple[int, int], Future[list[Batch]]] = {}

    @property
    def global_batch(self) -> int:
        """Samples in a step of all ranks."""
        return self.micro_batch_size * self.num_microbatches * self.dp_size

    def indices(self, consumed: int, microbatch: int) -> list[int]:
        """Dataset indices of one micro-batch of this rank."""
        first = consumed + (microbatch * self.dp_size + self.dp_rank) * self.micro_batch_size
        return [self._past_skipped(first + j) for j in range(self.micro_batch_size)]

    def batches(self, consumed: int, num_microbatches: int | None = None) -> Iterator[Batch]:
        """The micro-batches of the step that begins after `consumed` samples.

        num_microbatches: for this step only, when the batch size ramps up.
        """
        count = num_microbatches or self.num_microbatches
        if self._thread is None:
            for microbatch in range(count):
                yield self._read(consumed, microbatch).to(self.device, pin=self._on_gpu)
            return
        waiting = self._ahead.pop((consumed, count), None)
        for other in self._ahead.values():  # a step that turned out not to be next
            other.cancel()
        ready = waiting.result() if waiting is not None else self._read_step(consumed, count)
        following = (consumed + count * self.micro_batch_size * self.dp_size, count)
        self._ahead = {following: self._thread.submit(self._read_step, *following)}
        for batch in ready:
            yield batch.to(self.device, pin=self._on_gpu)

    def samples(self, consumed: int, count: int) -> list[int]:
        """Dataset indices of the `count` samples that follow `consumed`, over all ranks."""
        return [self._past_skipped(consumed + j) for j in range(count)]

    def leave_out(self, skip: Collection[int]) -> None:
        """Leave these samples of the dataset's order out as well, from now on."""
        self._skip = sorted({*self._skip, *skip})
        for other in self._ahead.values():
            other.cancel()
        self._ahead = {}

    def close(self) -> None:
        """Stop reading ahead."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _past_skipped(self, index: int) -> int:
        for skipped in self._skip:
            if skipped > index:
                break
            index += 1
        return index

    def _read(self, consumed: int, microbatch: int) -> Batch:
        return pack([self.dataset.sample(index) for index in self.indices(consumed, microbatch)])

    def _read_step(self, consumed: int, count: int) -> list[Batch]:
        return [self._read(consumed, microbatch) for microbatch in range(count)]


def evaluation_batches(
    dataset: SampleSource,
    samples: int,
    *,
    micro_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[Batch]:
    """The first `samples` samples of a dataset, or all it has, shared among the ranks.

    Every rank yields the same number of batches (`evaluation_steps`); what fills up the last ones has a loss mask of 0,
    so that sums of loss and of mask over all ranks do not depend on `dp_size` or `micro_batch_size`.
    """
    device = torch.device(device)
    total = _available(dataset, samples)
    for step in range(evaluation_steps(dataset, samples, micro_batch_size=micro_batch_size, dp_size=dp_size)):
        first = (step * dp_size + dp_rank) * micro_batch_size
        chosen = [
            dataset.sample(index) if index < total else _blank(dataset.sample(0))
            for index in range(first, first + micro_batch_size)
        ]
        yield pack(chosen).to(device, pin=device.type != "cpu")


def evaluation_steps(dataset: SampleSource, samples: int, *, micro_batch_size: int, dp_size: int = 1) -> int:
    """Batches that each rank gets from `evaluation_batches`."""
    return -(-_available(dataset, samples) // (micro_batch_size * dp_size))


def _available(dataset: SampleSource, samples: int) -> int:
    return samples if dataset.samples is None else min(samples, dataset.samples)


def _blank(sample: Sample) -> Sample:
    return Sample(sample.tokens, sample.labels, np.zeros_like(sample.loss_mask), sample.starts)
