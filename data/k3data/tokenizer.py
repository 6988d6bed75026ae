"""The byte-level BPE tokenizer: trained here or loaded from a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from k3train.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"

# What other families call the token that ends a document, in order of preference.
KNOWN_ENDS = (
    END_OF_DOCUMENT, "[EOS]", "<|end_of_text|>", "<eos>", "</s>", "<|eos|>", "<|im_end|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip


class Tokenizer:
    """Text to ids and back. Special tokens written out in a text are encoded as plain text, never as themselves."""

    def __init__(self, inner: tokenizers.Tokenizer, eod_token: str | None = None, origin: str = "tokenizer") -> None:
        """Raises DataError when no end-of-document token is in the vocabulary."""
        candidates = KNOWN_ENDS if eod_token is None else (eod_token,)
        ids = [(token, inner.token_to_id(token)) for token in candidates]
        known = [(token, number) for token, number in ids if number is not None]
        if not known:
            raise DataError(
                f"{origin} has no end-of-document token: none of {', '.join(candidates)} is in its vocabulary; "
                f"add one, e.g. {END_OF_DOCUMENT!r} under added_tokens"
            )
        self.eod_token, self.eod = known[0]
        self.inner = inner
        self.inner.encode_special_tokens = True
        self.inner.no_truncation()
        self.inner.no_padding()
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, path: str | Path, eod_token: str | None = None) -> Tokenizer:
        """Load a `tokenizer.json`, or the one in a folder. Raises DataError when it is missing or not a tokenizer."""
        file = tokenizer_file(path)
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust library raises plain Exception
            raise DataError(f"{file} is not a Hugging Face tokenizer.json: {error}") from error
        return cls(inner, eod_token, str(file))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Train byte-level BPE; the vocabulary comes out smaller when the texts have too few distinct pairs.

        Raises DataError for a vocabulary that cannot hold the 256 bytes and the end-of-document token.
        """
        if vocab_size < 257:
            raise DataError(
                f"vocab_size={vocab_size} cannot hold the 256 bytes and {END_OF_DOCUMENT}; give 257 or more"
            )
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.inner.to_str(pretty=True), encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any token added."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=False)


def tokenizer_file(path: str | Path) -> Path:
    """The `tokenizer.json` that a path names. Raises DataError when there is none."""
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"tokenizer={str(path)!r}: {file} does not exist; give a Hugging Face tokenizer.json, or null")
    return file


def fingerprint(path: str | Path) -> str:
    """A hash of the tokenizer's file."""
    return hashlib.blake2b(tokenizer_file(path).read_bytes(), digest_size=16).hexdigest()
