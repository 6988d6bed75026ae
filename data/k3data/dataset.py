"""Samples by global index, on megatron-core's own datasets.

The order is a function of (seed, global sample index) alone. megatron's GPTDataset shuffles all the epochs that a run
asks for together, so its order depends on the length of the run; here each epoch is one GPTDataset of exactly one pass
with a seed of its own, and a longer or resumed run continues the same order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist

from k3data import manifest
from k3data.batch import Sample, sample_of
from k3data.manifest import Manifest
from k3data.prepare import cache_root, prepare
from k3train.errors import DataError
from k3train.platform import install

# Held-out samples are drawn in an order that no run's seed changes.
VALIDATION_SEED = 20201
# Indices of this many epochs are built together, by rank 0 first, and kept on disk.
_EPOCHS_ON_DISK = 8


class SampleSource(Protocol):
    """Anything that gives the sample of a global index; `samples` is None when it never ends."""

    samples: int | None

    def sample(self, index: int) -> Sample: ...


class _Vocabulary:
    """What GPTDataset asks of a tokenizer."""

    special_tokens_dict: dict[str, int] = {}
    pad = -1  # no token of the data is padding

    def __init__(self, size: int, eod: int) -> None:
        self.vocab_size, self.eod = size, eod
        self.unique_identifiers = {"class": "k3data", "vocab_size": size, "eod": eod}


def prepare_collectively(make: Callable[[], Manifest]) -> Manifest:
    """Let rank 0 make a dataset and every rank open it; works without torch.distributed too.

    The other ranks wait in a collective: what takes longer than the process group's timeout is for
    `k3train data prepare` to make beforehand.

    Raises on every rank what rank 0 raised, and DataError on a rank that cannot see the folder.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = make()
        except Exception as error:
            outcome[0] = error
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    made: Manifest = outcome[0]
    if dist.get_rank() == 0:
        return made
    try:
        return manifest.load(made.folder)
    except DataError as error:
        raise DataError(
            f"rank {dist.get_rank()} on {os.uname().nodename} does not see {made.folder}, which rank 0 made; "
            "set K3TRAIN_CACHE (or data.cache) to a folder that every node shares"
        ) from error


def open_corpus(
    inputs: list[str],
    *,
    prefix: str | None = None,
    tokenizer: str | None = None,
    vocab_size: int = 4096,
    validation_fraction: float = 0.02,
    text_field: str = "text",
    workers: int = 0,
    cache: str | None = None,
    progress: Any = None,
) -> Manifest:
    """The prepared dataset of a run: the one at `prefix`, else that of `inputs`, made by rank 0 if need be."""
    if prefix is not None:
        return manifest.load(prefix)
    return prepare_collectively(
        lambda: prepare(
            inputs, tokenizer, vocab_size=vocab_size, workers=workers, validation_fraction=validation_fraction,
            text_field=text_field, cache=cache, progress=progress,
        )
    )  # fmt: skip


class TextDataset:
    """One split of a prepared dataset as an endless (train) or one-pass (valid) map from global index to sample."""

    def __init__(
        self,
        data: Manifest,
        split: str,
        seq_length: int,
        *,
        seed: int = 0,
        samples: int | None = None,
        cache: str | Path | None = None,
    ) -> None:
        """Build the indices of the epochs that `samples` needs (one epoch for None); later ones when they are met.

        Collective when torch.distributed is initialised: rank 0 builds and writes, the others read.
        `split` is train (endless, shuffled by `seed`) or valid (one pass, in an order that no seed changes).
        Raises DataError when the split is shorter than one sequence.
        """
        install()
        tokens = getattr(data, split).tokens
        self.per_epoch = max(tokens - 1, 0) // seq_length
        if not self.per_epoch:
            raise DataError(
                f"the {split} split of {data.folder} holds {tokens} tokens, fewer than one sequence of {seq_length} "
                "and its last label; give more text or a smaller train.seq_length"
            )
        self.data, self.split, self.seq_length = data, split, seq_length
        self.samples = self.per_epoch if split == "valid" else None
        self.seed = VALIDATION_SEED if split == "valid" else seed
        self._index_folder = _writable(Path(data.folder, "index"), cache_root(cache) / "index" / data.key[:16])
        self._epochs: dict[int, Any] = {}
        epochs = 1 if samples is None or split == "valid" else -(-samples // self.per_epoch)
        for epoch in range(min(epochs, _EPOCHS_ON_DISK)):
            self._epochs[epoch] = self._build(epoch, on_disk=True)

    def _config(self, epoch: int, cache: str) -> Any:
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

        prefixes = [self.data.prefix(self.split)]
        return GPTDatasetConfig(
            random_seed=(self.seed * 1_000_003 + epoch) % 2**32,
            sequence_length=self.seq_length,
            blend_per_split=[(prefixes, None), None, None],
            path_to_cache=cache,
            tokenizer=_Vocabulary(self.data.vocab_size, self.data.eod),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )

    def _build(self, epoch: int, on_disk: bool) -> Any:
        """One pass over the split, as megatron's builder makes it.

        Off the disk every rank builds its own copy in memory, without talking to the others.
        """
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset
        from megatron.core.datasets.utils import Split

        if on_disk:
            config = self._config(epoch, str(self._index_folder))
            return BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, config).build()[0]
        logging.getLogger("megatron.core.datasets.gpt_dataset").setLevel(logging.ERROR)  # "unable to save indexes"
        config = self._config(epoch, "")  # an empty path is "nowhere"; None would be a folder beside the data
        low = GPTDataset.build_low_level_dataset(self.data.prefix(self.split), config)
        documents = np.arange(GPTDataset.numel_low_level_dataset(low), dtype=np.int32)
        return GPTDataset(low, self.data.prefix(self.split), documents, None, Split.train, config)

    def sample(self, index: int) -> Sample:
        """The sample of a global index >= 0. Raises IndexError past the end of a one-pass split."""
        if index < 0 or (self.samples is not None and index >= self.samples):
            raise IndexError(f"sample {index} of {self.samples}")
        epoch, inside = divmod(index, self.per_epoch)
        if epoch not in self._epochs:
            self._epochs[epoch] = self._build(epoch, on_disk=False)
        item = self._epochs[epoch][inside]
        tokens, labels = item["tokens"].numpy(), item["labels"].numpy()
        return sample_of(np.append(tokens, labels[-1]), self.data.eod)


def _writable(*folders: Path) -> Path:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise DataError(f"cannot write indices to {' or '.join(map(str, folders))}; set K3TRAIN_CACHE to a writable folder")
