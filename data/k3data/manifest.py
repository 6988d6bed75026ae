"""What a prepared dataset says about itself: `manifest.json` beside its files."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3train.errors import DataError

FILE = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Split:
    """Sizes of the training or the held-out part."""

    documents: int
    tokens: int  # with one end-of-document token a document
    text_bytes: int  # UTF-8 bytes of the documents


@dataclass(frozen=True)
class Manifest:
    """A folder with `train.bin/.idx`, `valid.bin/.idx`, `tokenizer.json` and this record as `manifest.json`.

    `valid` has no documents when the validation fraction was 0.
    """

    key: str  # hash of file names, contents and settings
    vocab_size: int
    eod: int
    eod_token: str
    train: Split
    valid: Split
    unigram_nats: float | None  # cross-entropy of the validation targets under train's token frequencies
    report: dict[str, int] = field(default_factory=dict)  # troubles met while reading: kind -> count
    examples: tuple[str, ...] = ()  # the first few of each kind
    inputs: tuple[str, ...] = ()
    format: int = FORMAT
    folder: str = ""  # where it was loaded from; not stored
    reused: bool = False  # True when it was found prepared; not stored

    @property
    def tokenizer(self) -> Path:
        return Path(self.folder, "tokenizer.json")

    def prefix(self, split: str) -> str:
        """Path of the split's `.bin` and `.idx` without the suffix; `split` is train or valid."""
        return str(Path(self.folder, split))

    @property
    def tokens_per_byte(self) -> float:
        """Predicted tokens per byte of validation text: the first token of a document is not predicted."""
        return (self.valid.tokens - self.valid.documents) / max(self.valid.text_bytes, 1)

    def bits_per_byte(self, nats_per_token: float) -> float:
        """A validation loss as bits per byte of text, which does not depend on the tokenizer."""
        return nats_per_token * self.tokens_per_byte / math.log(2)

    def summary(self) -> str:
        """One line for people."""
        trouble = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in self.report.items())
        return (
            f"{self.train.documents:,} documents and {self.train.tokens:,} tokens to train on, "
            f"{self.valid.documents:,} and {self.valid.tokens:,} held out, vocabulary {self.vocab_size:,}"
            + (f"; met: {trouble}" if trouble else "")
        )

    def save(self) -> None:
        record = dataclasses.asdict(self)
        del record["folder"], record["reused"]
        with open(Path(self.folder, FILE), "w", encoding="utf-8") as out:
            json.dump(record, out, indent=2)
            out.flush()
            os.fsync(out.fileno())


def load(path: str | Path, reused: bool = True) -> Manifest:
    """Read the manifest of a prepared folder; a prefix such as `folder/train` names its folder.

    Raises DataError when there is none, when a file of the dataset is missing, or when another version wrote it.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir() and folder.name in ("train", "valid"):
        folder = folder.parent
    if not Path(folder, FILE).is_file():
        raise DataError(
            f"{str(path)!r} is no prepared dataset ({FILE} not found); make one with `k3train data prepare`"
        )
    record: dict[str, Any] = json.loads(Path(folder, FILE).read_text(encoding="utf-8"))
    if record.get("format") != FORMAT:
        raise DataError(f"{folder} has format {record.get('format')}, this version reads {FORMAT}; prepare it again")
    record["train"], record["valid"] = Split(**record["train"]), Split(**record["valid"])
    record["examples"], record["inputs"] = tuple(record["examples"]), tuple(record["inputs"])
    manifest = Manifest(**record, folder=str(folder.resolve()), reused=reused)
    needed = ["tokenizer.json", "train.bin", "train.idx"] + (
        ["valid.bin", "valid.idx"] if manifest.valid.tokens else []
    )
    missing = [name for name in needed if not Path(folder, name).is_file()]
    if missing:
        raise DataError(f"the dataset {folder} lacks {', '.join(missing)}; delete the folder and prepare it again")
    return manifest
