"""Where documents come from: plain text, JSON lines, gzip of these, folders of source files, the default corpus.

A document has a name that does not depend on the machine (its path below the input that was given; for JSON lines the
byte offset of its line as well), and everything decided per document is a function of that name.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import gzip
import hashlib
import itertools
import json
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import BinaryIO, cast

from k3train.errors import DataError

DEFAULT = "default"

# What a folder is searched for. A file named by itself or by a glob is read whatever its suffix.
TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".rst", ".tex", ".jsonl", ".json", ".html", ".htm", ".css", ".xml", ".yaml", ".yml",
    ".toml", ".ini", ".cfg", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".rs", ".go",
    ".java", ".kt", ".scala", ".js", ".jsx", ".ts", ".tsx", ".rb", ".php", ".pl", ".lua", ".jl", ".r", ".m", ".swift",
    ".cs", ".fs", ".hs", ".ml", ".ex", ".erl", ".clj", ".sh", ".bash", ".sql", ".proto", ".cmake", ".tcl", ".v", ".sv",
    ".vhd", ".f", ".f90",
})  # fmt: skip

# Folders without text that anyone wrote for reading.
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})

# Parts of the standard library that are tests or that differ between installations of one version.
_NOT_STDLIB = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Source:
    """One file, or one range of a file, that yields documents in a fixed order."""

    name: str  # machine-independent
    path: str = ""
    lines: bool = False  # JSON lines; else the whole is one document
    compressed: bool = False
    start: int = 0  # byte range of an uncompressed JSON-lines file: lines that begin in [start, end)
    end: int = -1  # -1: to the end of the file
    inline: str | None = None  # the text itself, for documents that are no file
    size: int = 0  # bytes on disk, of the range when there is one


@dataclass
class Document:
    """One text with the name that decides whether it is held out."""

    name: str
    text: str
    valid_utf8: bool = True


@dataclass
class Report:
    """What was met while reading. `examples` holds the first few names of each kind of trouble."""

    documents: int = 0
    empty: int = 0  # nothing but white space; left out
    invalid_utf8: int = 0  # kept, with U+FFFD for the bad bytes
    truncated: int = 0  # archives that end early or are damaged; kept up to there
    invalid_json: int = 0  # lines left out
    missing_field: int = 0  # records without the text field; left out
    binary: int = 0  # files with NUL bytes; left out
    other_files: int = 0  # files of a folder without a suffix of text; left out
    duplicates: int = 0  # files that several inputs name; read once
    examples: list[str] = field(default_factory=list)

    def note(self, kind: str, where: str) -> None:
        """Count one trouble of `kind` and keep the place for the first few of them."""
        count = getattr(self, kind) + 1
        setattr(self, kind, count)
        if count <= 5:
            self.examples.append(f"{kind}: {where}")

    def add(self, other: Report) -> None:
        for item in fields(self):
            if item.name != "examples":
                setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
        self.examples = (self.examples + other.examples)[:40]

    def troubles(self) -> dict[str, int]:
        """The counts that are not zero, without the documents themselves."""
        counts = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: n for name, n in counts.items() if name not in ("documents", "examples") and n}


def fraction_of(name: str) -> float:
    """A number in [0, 1) that depends on `name` alone; the split compares it with the validation fraction."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def find_sources(inputs: list[str], report: Report) -> list[Source]:
    """Resolve files, folders, globs and the word `default` to sources, sorted by name.

    Raises DataError for an input that matches nothing, with the nearest name that exists.
    """
    if not inputs:
        raise DataError("no input was given; name files, folders or globs, e.g. input='corpus/*.jsonl'")
    found: dict[str, Source] = {}  # by path, so that a file named twice is read once
    names: set[str] = set()
    for item in inputs:
        if item == DEFAULT:
            for source in default_corpus():
                found.setdefault(source.path or source.name, source)
            continue
        for path, name in _expand(Path(item).expanduser(), report):
            key = str(path.resolve())
            if key in found:
                report.note("duplicates", name)
                continue
            if name in names:  # two inputs with equal tails: tell them apart by the full path
                name = key.lstrip("/")
            names.add(name)
            found[key] = _source_of(path, name)
    return sorted(found.values(), key=lambda source: source.name)


def _source_of(path: Path, name: str) -> Source:
    lines = name.removesuffix(".gz").endswith(".jsonl")
    return Source(name, str(path), lines, compressed=name.endswith(".gz"), size=path.stat().st_size)


def _expand(item: Path, report: Report) -> Iterator[tuple[Path, str]]:
    """Yield (path, name) of every file of one input."""
    if item.is_file():
        yield item, item.name
        return
    if item.is_dir():
        files = list(_walk(item, report))
        if not files:
            raise DataError(f"the folder '{item}' holds no text file (.txt .jsonl .py .md ... or .gz of these)")
        yield from files
        return
    fixed = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), item.parts))
    pattern = str(item.relative_to(fixed)) if fixed != item else ""
    if pattern.endswith("**"):  # which pathlib takes for folders alone
        pattern += "/*"
    matches = sorted(fixed.glob(pattern)) if pattern else []
    if not matches:
        raise DataError(f"input '{item}' matches no file or folder{_nearest(item, fixed)}")
    for match in matches:
        if match.is_file():
            yield match, (fixed.resolve().name / match.relative_to(fixed)).as_posix()
        elif match.is_dir() and "**" not in pattern:  # `**` lists the files of the folder as well
            yield from _walk(match, report)


def _walk(folder: Path, report: Report) -> Iterator[tuple[Path, str]]:
    base = Path(folder.resolve().name)
    for here, folders, files in folder.walk():
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in SKIPPED_FOLDERS)
        for file in sorted(files):
            path = here / file
            name = (base / path.relative_to(folder)).as_posix()
            if file.startswith(".") or not path.is_file():
                continue
            if Path(file.removesuffix(".gz")).suffix.lower() in TEXT_SUFFIXES:
                yield path, name
            else:
                report.note("other_files", name)


def _nearest(item: Path, fixed: Path) -> str:
    if fixed != item:
        return "" if fixed.is_dir() else f"; the folder '{fixed}' does not exist"
    if not item.parent.is_dir():
        return f"; the folder '{item.parent}' does not exist"
    close = difflib.get_close_matches(item.name, [path.name for path in item.parent.iterdir()], n=1)
    return f"; did you mean '{item.parent / close[0]}'?" if close else f" in '{item.parent}'"


def default_corpus() -> list[Source]:
    """The running interpreter's standard library without its tests, and pydoc's topics: 12 MB of text everywhere.

    Raises DataError when the interpreter carries no sources (a zipped or stripped standard library).
    """
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    for here, folders, files in root.walk():
        folders[:] = [f for f in folders if f not in _NOT_STDLIB]
        for file in files:
            # _sysconfigdata describes how this very interpreter was built; the topics are read as text below.
            if not file.endswith(".py") or file.startswith("_sysconfigdata"):
                continue
            path = here / file
            name = ("stdlib" / path.relative_to(root)).as_posix()
            if name != "stdlib/pydoc_data/topics.py":
                sources.append(Source(name=name, path=str(path), size=path.stat().st_size))
    if len(sources) < 100:
        raise DataError(
            f"the default corpus is the standard library's sources, and '{root}' holds {len(sources)} of them; "
            "give a corpus of your own, e.g. data.corpus='texts/*.txt'"
        )
    with contextlib.suppress(ImportError):
        from pydoc_data.topics import topics

        for topic, text in topics.items():
            sources.append(Source(name=f"pydoc/{topic}", inline=text, size=len(text.encode())))
    return sorted(sources, key=lambda source: source.name)


def split_source(source: Source, bytes_each: int) -> list[Source]:
    """Cut a large uncompressed JSON-lines file into ranges; other sources stay whole."""
    if not source.lines or source.compressed or source.size <= bytes_each:
        return [source]
    cuts = [*range(0, source.size, bytes_each), source.size]
    return [
        Source(source.name, source.path, True, False, start, end, None, end - start)
        for start, end in zip(cuts, cuts[1:], strict=False)
    ]


def read_documents(source: Source, text_field: str, report: Report) -> Iterator[Document]:
    """Yield the documents of a source in order; what cannot be used is counted in `report`, never silently dropped."""
    if source.inline is not None:
        found: Iterator[Document] = iter([Document(source.name, source.inline)])
    elif source.lines:
        found = _read_lines(source, text_field, report)
    else:
        found = _read_whole(source, report)
    for document in found:
        if not document.text or document.text.isspace():
            report.note("empty", document.name)
            continue
        if not document.valid_utf8:
            report.note("invalid_utf8", document.name)
        report.documents += 1
        yield document


def _decode(name: str, data: bytes) -> Document:
    try:
        return Document(name, data.decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError:
        return Document(name, data.decode("utf-8", "replace").removeprefix("\ufeff"), valid_utf8=False)


def _blocks(file: BinaryIO, name: str, report: Report) -> Iterator[bytes]:
    """The bytes of a file in blocks; an archive that ends early or is damaged ends there, and is counted."""
    while True:
        try:
            block = file.read1(_BLOCK) if isinstance(file, gzip.GzipFile) else file.read(_BLOCK)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            report.note("truncated", f"{name} ({error})")
            return
        if not block:
            return
        yield block


def _open(source: Source) -> BinaryIO:
    try:
        if source.compressed:
            return cast(BinaryIO, gzip.open(source.path, "rb"))
        return open(source.path, "rb")
    except OSError as error:
        raise DataError(f"cannot read {source.path!r}: {error.strerror or error}") from error


def _read_whole(source: Source, report: Report) -> Iterator[Document]:
    with _open(source) as file:
        data = b"".join(_blocks(file, source.name, report))
    if b"\0" in data[:_BLOCK]:
        report.note("binary", source.name)
        return
    yield _decode(source.name, data)


def _read_lines(source: Source, text_field: str, report: Report) -> Iterator[Document]:
    for offset, line in _lines(source, report):
        name = f"{source.name}:{offset}"
        if line.isspace():
            continue
        document = _decode(name, line)
        try:
            record = json.loads(document.text)
        except ValueError:
            report.note("invalid_json", name)
            continue
        text = record.get(text_field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(sorted(record)[:8]) if isinstance(record, dict) else type(record).__name__
            report.note("missing_field", f"{name} (has: {keys})")
            continue
        # A JSON escape can name half of a surrogate pair, which no UTF-8 can hold.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        yield Document(name, clean, document.valid_utf8 and clean == text)


def _lines(source: Source, report: Report) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, line) for the lines that begin inside the source's range."""
    with _open(source) as file:
        position = source.start
        if position:  # a line that began before the range belongs to the range before
            file.seek(position - 1)
            position += len(file.readline()) - 1
        rest = b""
        for block in _blocks(file, source.name, report):
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                if 0 <= source.end <= position:
                    return
                yield position, line + b"\n"
                position += len(line) + 1
        if rest and not 0 <= source.end <= position:
            yield position, rest
