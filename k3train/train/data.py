"""The data of a run: prepared once on rank 0, read by every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from k3train.config.schema import Config
from k3train.engine.base import Batch
from k3train.errors import ConfigError
from k3train.parallel.layout import Layout
from k3train.train import recall


class Source:
    """Training micro-batches as the engine takes them."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def batches(self, consumed_samples: int, micro_batches: int) -> Iterator[Batch]:
        return as_engine_batches(self.loader.batches(consumed_samples, micro_batches))

    def samples(self, consumed_samples: int, count: int) -> list[int]:
        return self.loader.samples(consumed_samples, count)

    def leave_out(self, samples: Collection[int]) -> None:
        self.loader.leave_out(samples)


def as_engine_batches(batches: Iterator[Any]) -> Iterator[Batch]:
    for b in batches:
        yield {"tokens": b.tokens, "labels": b.labels, "loss_mask": b.loss_mask, "cu_seqlens": b.cu_seqlens}


@dataclass
class RunData:
    """train: the batch source. held_out(): this rank's validation micro-batches and how many.

    Synthetic recall has no tokenizer, and 0 tokens a byte.
    """

    train: Source
    held_out: Callable[[], tuple[Iterator[Batch], int]] | None  # None where nothing is held out
    tokenizer: Path | None
    tokens_per_byte: float
    unigram_loss: float | None


def prepare_data(config: Config, layout: Layout, device: torch.device, say: Callable[[str], None]) -> RunData:
    """Tokenize the corpus once (rank 0; found again by its contents), then open it on every rank.

    Raises ConfigError when the model's vocabulary is smaller than the tokenizer's, DataError as the corpus' own room.
    """
    if config.data.prefix is None and config.data.corpus.startswith(recall.PREFIX):
        training, held_out = recall.datasets(config)
        say(f"data: {config.data.corpus} (guessing among its values costs {training.chance_nats:.3f} nats)")
        return _run_data(config, layout, device, training, held_out, None, 0.0, None)
    from k3data.dataset import TextDataset, open_corpus

    data, train, model = config.data, config.train, config.model
    manifest = open_corpus(
        [part.strip() for part in data.corpus.split(",")],
        prefix=data.prefix, tokenizer=data.tokenizer, vocab_size=model.vocab_size,
        validation_fraction=data.validation_fraction, text_field=data.text_field, workers=data.workers,
        cache=data.cache, progress=_progress(say),
    )  # fmt: skip
    say(f"data: {'reusing' if manifest.reused else 'prepared'} {manifest.folder}: {manifest.summary()}")
    if manifest.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {manifest.vocab_size} tokens but model.vocab_size is {model.vocab_size}; "
            f"type model.vocab_size={-(-manifest.vocab_size // 128) * 128}"
        )
    dataset = TextDataset(
        manifest, "train", train.seq_length, seed=config.run.seed, samples=train.steps * train.global_batch,
        cache=data.cache,
    )  # fmt: skip
    if not manifest.valid.tokens:
        return _run_data(config, layout, device, dataset, None, manifest.tokenizer, 0.0, None)
    held_out = TextDataset(manifest, "valid", train.seq_length, cache=data.cache)
    about = (manifest.tokenizer, manifest.tokens_per_byte, manifest.unigram_nats)
    return _run_data(config, layout, device, dataset, held_out, *about)


def _run_data(
    config: Config, layout: Layout, device: torch.device, training: Any, held_out: Any, tokenizer: Path | None,
    tokens_per_byte: float, unigram_loss: float | None,
) -> RunData:  # fmt: skip
    """Loaders of this rank over a training and a held-out dataset (None: nothing is held out)."""
    from k3data.loader import GlobalBatchLoader, evaluation_batches, evaluation_steps

    train = config.train
    ranks = {"dp_rank": layout.dp.rank(), "dp_size": layout.sizes.data, "micro_batch_size": train.micro_batch}
    micro_batches = train.global_batch // (train.micro_batch * layout.sizes.data)
    source = Source(GlobalBatchLoader(training, num_microbatches=micro_batches, device=device, **ranks))
    if held_out is None:
        return RunData(source, None, tokenizer, 0.0, None)
    steps = evaluation_steps(
        held_out, train.eval_samples, micro_batch_size=train.micro_batch, dp_size=layout.sizes.data
    )

    def validation() -> tuple[Iterator[Batch], int]:
        return as_engine_batches(evaluation_batches(held_out, train.eval_samples, device=device, **ranks)), steps

    return RunData(source, validation, tokenizer, tokens_per_byte, unigram_loss)


def _progress(say: Callable[[str], None]) -> Callable[[str, int, int], None]:
    """Tell every tenth of a stage, once the work has taken long enough to be wondered about."""
    seen: dict[str, int] = {}
    patience = time.monotonic() + 2.0

    def tell(stage: str, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if time.monotonic() > patience and seen.get(stage, -1) < tenth:
            seen[stage] = tenth
            if done < total:
                say(f"data: {stage} {100 * done // max(total, 1)} %")

    return tell
