"""Text to Megatron `.bin/.idx`, once: the result is cached under a hash of the contents.

    manifest = prepare(["corpus/*.jsonl"], tokenizer="tokenizer.json")

Everything is written into a folder beside the final one, which is renamed into place when it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from k3data import corpus, manifest
from k3data.corpus import DEFAULT, Report, Source
from k3data.manifest import Manifest, Split
from k3data.tokenizer import Tokenizer, fingerprint
from k3data.worker import Result, Task, run_all
from k3train.errors import DataError

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total) in bytes of text; the stages are reading, tokenizer, tokens, writing."""

# BPE merges of 64 MiB of text differ little from those of more; the sample is drawn by document name.
_TOKENIZER_SAMPLE = 64 << 20
# The contents of files above this are hashed once per (path, size, time of change).
_REMEMBERED = 64 << 20


def cache_root(cache: str | Path | None = None) -> Path:
    """The folder of caches: the argument, else $K3TRAIN_CACHE, else ~/.cache/k3train."""
    chosen = cache or os.environ.get("K3TRAIN_CACHE") or "~/.cache/k3train"
    return Path(chosen).expanduser()


def prepare(
    inputs: list[str],
    tokenizer: str | None = None,
    output: Path | str | None = None,
    *,
    vocab_size: int = 4096,
    workers: int = 0,
    validation_fraction: float = 0.02,
    text_field: str = "text",
    eod_token: str | None = None,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Make the dataset of `inputs`, or find it made (`Manifest.reused`).

    inputs: files, folders or globs of .txt, .jsonl, .gz of these, source files; the word `default` is the standard
        library of the running interpreter.
    tokenizer: a Hugging Face tokenizer.json (or its folder); None trains byte-level BPE of `vocab_size` on the
        training documents.
    output: the folder to make; None is a folder of the cache named by the contents.
    workers: tokenizing processes; 0 is one a core. The bytes written do not depend on it.
    validation_fraction: documents whose hashed name falls below it are held out; at least one is, unless it is 0.

    Raises DataError for inputs without a usable document, a bad tokenizer, or an output that holds other data.
    """
    if not 0 <= validation_fraction < 1:
        raise DataError(f"validation_fraction={validation_fraction} must lie in [0, 1); for example 0.02")
    tell = progress or (lambda stage, done, total: None)
    report = Report()
    root = cache_root(cache)
    sources = corpus.find_sources(inputs, report)
    total = sum(source.size for source in sources)
    if not total:
        raise DataError(f"{', '.join(inputs)}: {len(sources)} files and no text in them; give a corpus with text")
    settings = {
        "format": manifest.FORMAT,
        "tokenizer": fingerprint(tokenizer) if tokenizer else f"bpe-{vocab_size}",
        "eod_token": eod_token,
        "validation_fraction": validation_fraction,
        "text_field": text_field,
    }
    key = _content_key(sources, settings, root, lambda done: tell("reading", done, total))
    label = "default" if inputs == [DEFAULT] else re.sub(r"[^A-Za-z0-9]+", "-", Path(inputs[0]).stem).strip("-")[:40]
    target = Path(output).expanduser() if output else root / "data" / f"{label or 'corpus'}-{key[:16]}"

    found = _existing(target, key, asked=output is not None)
    if found is not None:
        return found
    with _lock(target):
        found = _existing(target, key, asked=output is not None)  # another process may have made it meanwhile
        if found is not None:
            return found
        for left in target.parent.glob(f".{target.name}.*.part"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        scratch = target.parent / f".{target.name}.{os.getpid()}.part"
        scratch.mkdir()
        try:
            _build(scratch, sources, inputs, key, tokenizer, eod_token, vocab_size, workers or _cores(total),
                   validation_fraction, text_field, report, total, tell)  # fmt: skip
            if target.is_dir():  # empty, made by the user, or a damaged entry of the cache
                shutil.rmtree(target)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return manifest.load(target, reused=False)


def _cores(total: int) -> int:
    """A process a core, as long as each has 2 MiB of text to start up for."""
    return max(1, min(len(os.sched_getaffinity(0)), total >> 21))


def _existing(target: Path, key: str, asked: bool) -> Manifest | None:
    """The dataset at `target`, if it is there and is the one asked for."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    try:
        found = manifest.load(target)
    except DataError:
        if asked:
            raise DataError(f"output={str(target)!r} exists and is no prepared dataset; name another folder") from None
        return None  # a damaged entry of the cache is made again
    if found.key != key:
        raise DataError(
            f"output={str(target)!r} holds a dataset of other contents or settings (key {found.key[:16]}, "
            f"asked for {key[:16]}); name another folder or delete it"
        )
    return found


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Let one process at a time make `target`; a file system without locks goes without."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = open(target.parent / f".{target.name}.lock", "w")  # noqa: SIM115
    except OSError as error:
        raise DataError(
            f"cannot write to {target.parent}: {error.strerror}; set K3TRAIN_CACHE (or data.cache) to a writable folder"
        ) from error
    with handle:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _content_key(sources: list[Source], settings: dict[str, object], root: Path, done: Callable[[int], None]) -> str:
    """A hash of the settings and of every source's name and bytes."""
    memo_path = root / "hashes.json"
    try:
        memo: dict[str, str] = json.loads(memo_path.read_text())
    except (OSError, ValueError):
        memo = {}
    remembered = len(memo)
    whole = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=20)
    read = 0
    for source in sources:
        if source.inline is not None:
            digest = hashlib.blake2b(source.inline.encode(), digest_size=16).hexdigest()
        else:
            digest = _file_hash(source.path, memo)
        whole.update(f"{source.name}\0{digest}\0".encode("utf-8", "surrogateescape"))
        read += source.size
        done(read)
    if len(memo) > remembered:
        with contextlib.suppress(OSError):
            root.mkdir(parents=True, exist_ok=True)
            beside = memo_path.with_suffix(f".{os.getpid()}")
            beside.write_text(json.dumps(memo))
            beside.replace(memo_path)
    return whole.hexdigest()


def _file_hash(path: str, memo: dict[str, str]) -> str:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            identity = f"{os.path.realpath(path)}:{status.st_size}:{status.st_mtime_ns}"
            if identity in memo:
                return memo[identity]
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path!r}: {error.strerror}") from error
    if status.st_size > _REMEMBERED:
        memo[identity] = digest
    return digest


def _build(
    scratch: Path,
    sources: list[Source],
    inputs: list[str],
    key: str,
    tokenizer_path: str | None,
    eod_token: str | None,
    vocab_size: int,
    workers: int,
    validation_fraction: float,
    text_field: str,
    report: Report,
    total: int,
    tell: Progress,
) -> None:
    """Fill the folder `scratch` with the whole dataset and its manifest."""
    if tokenizer_path:
        tokenizer = Tokenizer.load(tokenizer_path, eod_token)
    else:
        tokenizer = _train_tokenizer(sources, vocab_size, validation_fraction, text_field, total, tell)
    tokenizer.save(scratch / "tokenizer.json")
    # Tokens as the 16-bit type that megatron-core takes for small vocabularies.
    dtype = "uint16" if tokenizer.vocab_size < 65500 else "int32"

    tasks = [
        Task(tuple(group), str(scratch / "tokenizer.json"), tokenizer.eod_token, text_field,
             str(scratch / f"shard-{number:06d}"), dtype)
        for number, group in enumerate(_groups(sources, total, workers))
    ]  # fmt: skip
    finished = 0

    def done(size: int) -> None:
        nonlocal finished
        finished += size
        tell("tokens", finished, total)

    results = run_all(tasks, workers, done)
    for result in results:
        report.add(result.report)
    if not report.documents:
        raise DataError(_nothing(inputs, report, text_field))

    results, held_out = _choose(results, validation_fraction, tokenizer, scratch, dtype)
    splits, unigram = _write(scratch, results, held_out, tokenizer, dtype, tell)
    if not splits["train"].tokens:
        raise DataError(
            f"validation_fraction={validation_fraction} holds out every one of {report.documents} documents; "
            "give a smaller fraction or more documents"
        )
    Manifest(
        key=key, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod, eod_token=tokenizer.eod_token,
        train=splits["train"], valid=splits["valid"], unigram_nats=unigram, report=report.troubles(),
        examples=tuple(report.examples), inputs=tuple(inputs), folder=str(scratch),
    ).save()  # fmt: skip


def _nothing(inputs: list[str], report: Report, text_field: str) -> str:
    troubles = ", ".join(f"{count} {kind}" for kind, count in report.troubles().items()) or "no text"
    hint = ""
    if report.missing_field:
        hint = f"; the records have no text under {text_field!r}, set data.text_field to one of their fields"
    first = f" ({report.examples[0]})" if report.examples else ""
    return f"{', '.join(inputs)} gave no usable document: {troubles}{first}{hint}"


def _train_tokenizer(
    sources: list[Source], vocab_size: int, validation_fraction: float, text_field: str, total: int, tell: Progress
) -> Tokenizer:
    """Byte-level BPE on the training documents, or on a sample of them drawn by name."""
    share = min(1.0, _TOKENIZER_SAMPLE / total)

    def texts() -> Iterator[str]:
        read = 0
        for source in sources:
            for document in corpus.read_documents(source, text_field, Report()):
                kept = corpus.fraction_of(f"tokenizer/{document.name}") < share
                if kept and corpus.fraction_of(document.name) >= validation_fraction:
                    yield document.text
            read += source.size
            tell("tokenizer", read, total)

    return Tokenizer.train(texts(), vocab_size)


def _groups(sources: list[Source], total: int, workers: int) -> Iterator[list[Source]]:
    """Cut the sources, in order, into runs of a size that keeps every worker busy to the end."""
    target = min(max(total // (workers * 4), 1 << 18), 32 << 20)
    group: list[Source] = []
    size = 0
    for source in sources:
        for piece in corpus.split_source(source, target):
            group.append(piece)
            size += piece.size
            if size >= target:
                yield group
                group, size = [], 0
    if group:
        yield group


def _choose(
    results: list[Result], fraction: float, tokenizer: Tokenizer, scratch: Path, dtype: str
) -> tuple[list[Result], np.ndarray]:
    """Decide which documents are held out: those below the fraction, and at least one when it is not 0.

    A corpus of one document is cut in two at a line end.
    """
    fractions = np.concatenate([result.fractions for result in results])
    held_out = fractions < fraction
    if fraction == 0 or (held_out.any() and not held_out.all()):
        return results, held_out
    if len(fractions) > 1:
        held_out[:] = False
        held_out[np.argmin(fractions)] = True
        return results, held_out
    whole = next(result for result in results if len(result.lengths))
    ids = np.fromfile(whole.output, dtype=dtype)
    text = tokenizer.decode(ids[:-1].tolist())
    cut = text.rfind("\n", 0, int(len(text) * (1 - max(fraction, 0.01)))) + 1 or int(len(text) * (1 - fraction))
    pieces = [text[:cut], text[cut:]]
    if not all(piece.strip() for piece in pieces):
        return results, np.array([False])
    encoded = [[*tokenizer.encode(piece), tokenizer.eod] for piece in pieces]
    path = str(scratch / "shard-cut")
    np.array(encoded[0] + encoded[1], dtype=dtype).tofile(path)
    sizes = np.array([len(piece.encode()) for piece in pieces], np.int64)
    halves = Result(path, 0, np.array([len(e) for e in encoded]), sizes, np.array([1.0, 0.0]), Report())
    return [halves], np.array([False, True])


def _write(
    scratch: Path, results: list[Result], held_out: np.ndarray, tokenizer: Tokenizer, dtype: str, tell: Progress
) -> tuple[dict[str, Split], float | None]:
    """Write both splits in the order of the sources; returns their sizes and the unigram cross-entropy (nats)."""
    from k3train.platform import install

    install()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    names = ("train", "valid") if held_out.any() else ("train",)
    builders = {name: IndexedDatasetBuilder(str(scratch / f"{name}.bin"), dtype=np.dtype(dtype).type) for name in names}
    counts = {name: np.zeros(tokenizer.vocab_size, np.int64) for name in ("train", "valid")}
    documents = {"train": 0, "valid": 0}
    tokens = dict(documents)
    text_bytes = dict(documents)
    total = int(sum(result.lengths.sum() for result in results))
    first = 0
    for result in results:
        shard = np.fromfile(result.output, dtype=dtype)
        ends = np.cumsum(result.lengths)
        for number, (end, length) in enumerate(zip(ends.tolist(), result.lengths.tolist(), strict=True)):
            name = "valid" if held_out[first + number] else "train"
            ids = shard[end - length : end]
            builders[name].add_document(ids, [length])
            documents[name] += 1
            tokens[name] += length
            text_bytes[name] += int(result.text_bytes[number])
            # The first token of a held-out document is never predicted, so it is no target.
            counts[name] += np.bincount(ids if name == "train" else ids[1:], minlength=tokenizer.vocab_size)
        first += len(result.lengths)
        Path(result.output).unlink()
        tell("writing", tokens["train"] + tokens["valid"], total)
    for leftover in scratch.glob("shard-*"):
        leftover.unlink()
    for name, builder in builders.items():
        builder.finalize(str(scratch / f"{name}.idx"))
    for path in scratch.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    splits = {name: Split(documents[name], tokens[name], text_bytes[name]) for name in ("train", "valid")}
    return splits, unigram_cross_entropy(counts["train"], counts["valid"])


def unigram_cross_entropy(train: np.ndarray, targets: np.ndarray) -> float | None:
    """Mean -log p(token) in nats over target counts, p from train counts plus one; None for no targets."""
    if not targets.sum():
        return None
    log_p = np.log(train + 1.0) - math.log(float(train.sum() + len(train)))
    return float(-(targets * log_p).sum() / targets.sum())
