"""Verbs that take words instead of a configuration, and `data prepare`: arguments in, one call, lines out."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from k3train.config.schema import Config
from k3train.errors import CheckpointError, ConfigError


class _Parser(argparse.ArgumentParser):
    """Complains by exception, in the CLI's own way."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}; {self.format_usage().strip()}")


def _parser(verb: str, summary: str) -> _Parser:
    return _Parser(prog=f"k3train {verb}", description=summary)


def report(words: list[str]) -> int:
    """`k3train report RUN... [--output FILE] [--title TEXT]`."""
    parser = _parser("report", "One self-contained HTML page about one or more runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or its name inside runs/")
    parser.add_argument("--output", help="the page to write; default: report.html in the first run's folder")
    parser.add_argument("--title")
    args = parser.parse_args(words)
    from k3train.tracking.commands import run_report

    run_report([run_folder(run) for run in args.runs], args.output, args.title)
    return 0


def replay(words: list[str]) -> int:
    """`k3train track replay RUN [--fresh] [--mode MODE] [--project P] [--entity E]`."""
    parser = _parser("track replay", "Push a run's metrics.jsonl to W&B.")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--fresh", action="store_true", help="a new W&B run instead of the run's own")
    parser.add_argument("--mode", choices=("auto", "online", "offline"), default="auto")
    parser.add_argument("--project", default="k3train")
    parser.add_argument("--entity")
    args = parser.parse_args(words)
    from k3train.tracking.commands import run_replay

    run_replay(run_folder(args.run), mode=args.mode, project=args.project, entity=args.entity, fresh=args.fresh)
    return 0


def workspace(words: list[str]) -> int:
    """`k3train track workspace [--project P] [--entity E] [--output FILE]`."""
    parser = _parser("track workspace", "Build the W&B workspace; written as JSON when offline.")
    parser.add_argument("--project", default="k3train")
    parser.add_argument("--entity")
    parser.add_argument("--output")
    args = parser.parse_args(words)
    from k3train.tracking.commands import run_workspace

    run_workspace(project=args.project, entity=args.entity, output=args.output)
    return 0


def run_folder(text: str) -> Path:
    """A run's folder from its path or its name inside runs/. Raises ConfigError where there is neither."""
    for path in (Path(text).expanduser(), Path("runs") / text):
        if path.is_dir():
            return path
    there = sorted(p.name for p in Path("runs").iterdir() if p.is_dir()) if Path("runs").is_dir() else []
    raise ConfigError(
        f"there is no run {text!r}; " + (f"runs/ holds {', '.join(there)}" if there else "give its folder")
    )


# --- checkpoints ---------------------------------------------------------------------------------------------------


def _checkpoints(verb: str, summary: str, words: list[str], extend: Callable[[_Parser], None] | None = None):  # noqa: ANN202
    from k3train.train import checkpoint as disk

    parser = _parser(f"checkpoint {verb}", summary)
    parser.add_argument("run", metavar="RUN", help="a run folder, or its name inside runs/")
    if extend:
        extend(parser)
    args = parser.parse_args(words)
    folder = run_folder(args.run)
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    found = disk.list_checkpoints(root)
    if not found:
        raise CheckpointError(f"{root} holds no checkpoint; give the folder of a run that has saved one")
    return args, root, found, disk


def checkpoint_list(words: list[str]) -> int:
    """`k3train checkpoint list RUN`: step, size and age of each, newest last."""
    _, _, found, _ = _checkpoints("list", "List a run's checkpoints.", words)
    for each in found:
        files = [f for f in each.path.rglob("*") if f.is_file()]
        size, age = sum(f.stat().st_size for f in files), time.time() - each.path.stat().st_mtime
        print(f"{each.path}  step {each.step:>8}  {size / 1e6:>10.1f} MB  {len(files):>4} files  {_ago(age)} old")
    return 0


def checkpoint_verify(words: list[str]) -> int:
    """`k3train checkpoint verify RUN`: 0 when every checksum holds, else 1 with the damage named."""
    _, _, found, disk = _checkpoints("verify", "Compare every file with its checksum.", words)
    damaged = 0
    for each in found:
        try:
            disk.verify(each.path)
            print(f"{each.path}  whole")
        except CheckpointError as error:
            damaged += 1
            print(f"{each.path}  DAMAGED: {error}")
    return int(damaged > 0)


def checkpoint_prune(words: list[str]) -> int:
    """`k3train checkpoint prune RUN [--keep-last N] [--keep-every STEPS]`."""

    def extend(parser: _Parser) -> None:
        parser.add_argument("--keep-last", type=int, default=2)
        parser.add_argument("--keep-every", type=int)

    args, root, found, disk = _checkpoints("prune", "Delete old checkpoints; the newest are kept.", words, extend)
    removed = disk.prune(root, args.keep_last, args.keep_every)
    print("\n".join(f"removed {path}" for path in removed) or f"nothing to remove: {len(found)} checkpoints are kept")
    return 0


def _ago(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} seconds"


# --- data ----------------------------------------------------------------------------------------------------------


def data_prepare(config: Config) -> int:
    """`k3train data prepare input=... [tokenizer=PATH] [output=FOLDER]`."""
    from k3data.prepare import prepare

    data = config.data
    if data.input is None:
        raise ConfigError("what is to be read? type k3train data prepare input='corpus/*.jsonl'")
    inputs = [part.strip() for part in data.input.split(",") if part.strip()]
    shown = _Shown()
    manifest = prepare(
        inputs, data.tokenizer, data.output, vocab_size=config.model.vocab_size, workers=data.workers,
        validation_fraction=data.validation_fraction, text_field=data.text_field, cache=data.cache, progress=shown,
    )  # fmt: skip
    print(f"{'found again' if manifest.reused else 'prepared'}: {manifest.folder}")
    print(manifest.summary())
    print(f"train on it: k3train train data.prefix={manifest.folder} model.vocab_size={_rounded(manifest.vocab_size)}")
    return 0


def _rounded(vocabulary: int) -> int:
    return -(-vocabulary // 128) * 128


class _Shown:
    """Progress on one line of a terminal, or a line every ten percent elsewhere."""

    def __init__(self) -> None:
        self.last = ("", -1)

    def __call__(self, stage: str, done: int, total: int) -> None:
        percent = 100 * done // max(1, total)
        if sys.stderr.isatty():
            end = "\n" if percent >= 100 else ""
            print(f"\r{stage}: {percent:3d} % of {total / 1e6:,.1f} MB", end=end, file=sys.stderr, flush=True)
        elif (stage, percent // 10) != self.last:
            self.last = (stage, percent // 10)
            print(f"{stage}: {percent} % of {total / 1e6:,.1f} MB", file=sys.stderr, flush=True)
