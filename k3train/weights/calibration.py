"""Text for quantisation: tokens that shape the Hessians, tokens that accept or refuse, tokens that judge in the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3train.config.schema import Config
from k3train.errors import DataError, WeightsError
from k3train.weights.streaming import TokenBatch

ACCEPT_SHARE = 5  # one sequence in so many decides about acceptance
TOKENS_A_BATCH = 4096


@dataclass
class Texts:
    """Disjoint sets of sequences, each int64 [n, s + 1]; `end` is the token that ends a document."""

    train: Tensor
    accept: Tensor
    judge: Tensor
    end: int

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.train, self.accept, self.judge

    def save(self, path: Path) -> None:
        parts = {"train": self.train, "accept": self.accept, "judge": self.judge, "end": torch.tensor([self.end])}
        part = path.with_name(path.name + ".part")
        save_file({name: tensor.contiguous() for name, tensor in parts.items()}, part)
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Texts:
        parts = load_file(path)
        return cls(parts["train"], parts["accept"], parts["judge"], int(parts["end"]))


def shared_texts(path: Path, make: Callable[[], Texts], *, rank: int, patience: float = 600.0) -> Texts:
    """Rank 0 makes the texts once and keeps them at `path`; the other processes, and a resumed run, read them there."""
    until = time.monotonic() + patience
    if rank == 0 and not path.exists():
        make().save(path)
    while not path.exists():
        if time.monotonic() > until:
            raise WeightsError(f"{path} did not appear within {patience:.0f} s; did the process of rank 0 end?")
        time.sleep(0.05)
    return Texts.load(path)


def read_texts(config: Config, tokenizer: Path | None, length: int, *, calibrate: bool, judge_tokens: int) -> Texts:
    """Sequences of `length` tokens: calibration text, and held-out text that no part of it overlaps.

    quantize.calibration names the text; without it the run's validation text serves both, in separate parts.
    Raises DataError when there is no tokenizer or too little text.
    """
    if tokenizer is None or not tokenizer.is_file():
        raise DataError("the folder has no tokenizer.json, which calibration and evaluation on text need")
    wanted = -(-config.quantize.calibration_tokens // length) if calibrate else 0
    judged = max(1, judge_tokens // length)
    held_out = _dataset(config, [config.data.corpus], config.data.prefix, "valid", tokenizer, length)
    if calibrate and config.quantize.calibration is not None:
        text = _dataset(config, [config.quantize.calibration], None, "train", tokenizer, length)
        chosen = _rows(text, range(min(wanted, text.per_epoch)))
        judge = _rows(held_out, range(min(judged, held_out.samples)))
    else:
        have = held_out.samples
        judged = min(judged, max(1, have // 4) if calibrate else have)
        wanted = min(wanted, have - judged)
        chosen = _rows(held_out, range(wanted))
        judge = _rows(held_out, range(have - judged, have))
    if calibrate and len(chosen) < 2:
        raise DataError(
            f"{len(chosen)} sequences of {length} tokens to calibrate with; give more text (quantize.calibration=FILE) "
            "or a smaller train.seq_length"
        )
    accept = len(chosen) // ACCEPT_SHARE if len(chosen) >= ACCEPT_SHARE else len(chosen) // 2
    train = chosen[: len(chosen) - accept]
    return Texts(train, chosen[len(chosen) - accept :], judge, held_out.data.eod)


def token_batches(sequences: Tensor, end: int) -> list[TokenBatch]:
    """Sequences int64 [n, s + 1] as packed streams of about 4096 tokens, cut where documents end."""
    from k3data.batch import pack, sample_of

    if not len(sequences):
        return []
    length = sequences.shape[1] - 1
    batches = []
    for part in sequences.split(max(1, TOKENS_A_BATCH // length)):
        packed = pack([sample_of(row.numpy(), end) for row in part])
        batches.append(
            TokenBatch(packed.tokens, packed.labels, packed.loss_mask > 0, packed.cu_seqlens, sequence_length=length)
        )
    return batches


def _dataset(config: Config, inputs: list[str], prefix: str | None, split: str, tokenizer: Path, length: int) -> Any:
    from k3data.dataset import TextDataset, open_corpus

    data = config.data
    manifest = open_corpus(
        inputs,
        prefix=prefix,
        tokenizer=str(tokenizer) if prefix is None else None,
        vocab_size=config.model.vocab_size,
        validation_fraction=data.validation_fraction,
        text_field=data.text_field,
        workers=data.workers,
        cache=data.cache,
    )
    return TextDataset(manifest, split, length, cache=data.cache)


def _rows(dataset: Any, indices: range) -> Tensor:
    rows = []
    for index in indices:
        sample = dataset.sample(index)
        tokens, labels = torch.from_numpy(sample.tokens), torch.from_numpy(sample.labels)
        rows.append(torch.cat([tokens, labels[-1:]]))
    return torch.stack(rows) if rows else torch.empty(0, 1, dtype=torch.int64)
