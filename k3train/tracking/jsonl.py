"""`metrics.jsonl`: one JSON object a line, the truth about a run.

A line is `{"step": int, "time": unix seconds, ...metrics}`; an event is `{"step", "time", "event": kind, "message"}`.
Steps never decrease within the file. When a run resumes from an older step, the lines past that step describe a future
that did not happen: they move to `metrics.discarded.jsonl`, and a `resume` event says how many there were.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from k3train.durable import write_atomically

log = logging.getLogger(__name__)

MATRIX_DIGITS = 5  # significant digits of numbers inside lists; scalars keep every bit
LARGE_MATRIX = 1_000  # cells from which numpy rounds faster than a loop
PENDING_LINES = 10_000  # lines kept in memory while the disk refuses them
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _plain(value: Any, *, inside_list: bool = False) -> Any:
    """Turn numpy and torch values into what JSON holds; a non-finite number becomes the string `NaN` or `Infinity`."""
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return float(f"{value:.{MATRIX_DIGITS}g}") if inside_list else value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, inside_list=inside_list) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        large = len(value) and isinstance(value[0], (list, tuple)) and len(value) * len(value[0]) > LARGE_MATRIX
        if large and (fast := _plain_matrix(value)) is not None:
            return fast
        return [_plain(item, inside_list=True) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars, torch tensors
        return _plain(value.tolist(), inside_list=inside_list)
    raise TypeError(f"a metric must be a number, a string or lists of them, got {type(value).__name__}: {value!r}")


def _plain_matrix(rows: Any) -> Any:
    """`_plain` of a large matrix (a load of 90 layers x 900 experts) many times faster; None when it is no such."""
    import numpy as np

    try:
        array = np.asarray(rows, dtype=np.float64)
    except (TypeError, ValueError):  # rows of unequal length, or not numbers
        return None
    if not np.isfinite(array).all():
        return None
    with np.errstate(divide="ignore"):
        places = MATRIX_DIGITS - 1 - np.floor(np.log10(np.abs(array)))
    scale = 10.0 ** np.clip(np.where(np.isfinite(places), places, 0), -300, 300)
    return (np.round(array * scale) / scale).tolist()


def _revive(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, list):
        return [_revive(item) for item in value]
    return value


def encode_line(record: Mapping[str, Any]) -> bytes:
    """One record as a line of strict JSON (no bare `NaN`, which `jq` and browsers refuse), newline included."""
    return (json.dumps(_plain(record), allow_nan=False, separators=(", ", ": ")) + "\n").encode()


def _decode(raw: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return record


def iter_jsonl(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics file in order; a torn last line is passed over, a damaged one is reported."""
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            record = _decode(raw) if raw.endswith(b"\n") else None
            if record is not None:
                yield {key: value if key in ("event", "message") else _revive(value) for key, value in record.items()}
            elif raw.endswith(b"\n") and raw.strip():
                log.warning("%s line %d is not a metrics record and is left out", path, number)


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a metrics file; an absent file is an empty history."""
    return list(iter_jsonl(path)) if Path(path).exists() else []


def discarded_path(path: str | os.PathLike[str]) -> Path:
    """Where the lines of an abandoned future go: `metrics.jsonl` -> `metrics.discarded.jsonl`."""
    return Path(path).with_suffix(".discarded.jsonl")


class JsonlWriter:
    """Append-only writer of a run's metrics.

    Args:
        path: the file; its folder is made if needed.
        resume_step: the last step that the resumed checkpoint holds; lines past it are set aside (see above).
            None starts a new history: whatever an earlier attempt left is set aside whole.

    A disk that refuses a line (full, read-only) never stops the run: the line waits in memory and is tried again with
    the next one; `lost` counts those that outgrew the waiting room.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.lost = 0
        self._pending: list[bytes] = []
        self._complained = False
        discarded, repaired = self._cut(resume_step)
        self._open()
        if resume_step is not None:
            message = f"resumed after step {resume_step}"
            if discarded:
                message += f"; {discarded} lines past it moved to {discarded_path(self.path).name}"
            self.event("resume", message, resume_step)
        elif discarded:
            self.event("restart", f"new start; {discarded} earlier lines moved to {discarded_path(self.path).name}", 0)
        elif repaired:
            log.warning("%s ended in a torn line, which was cut off", self.path)

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._end = os.fstat(self._fd).st_size

    def _cut(self, last_step: int | None) -> tuple[int, bool]:
        """Keep the lines up to `last_step`, set the others aside. Returns (lines set aside, was there damage)."""
        if not self.path.exists():
            return 0, False
        keep: list[bytes] = []
        aside: list[bytes] = []
        damaged = False
        for raw in self.path.read_bytes().splitlines(keepends=True):
            record = _decode(raw) if raw.endswith(b"\n") else None
            if record is None:
                damaged = True
            elif last_step is not None and record["step"] <= last_step:
                keep.append(raw)
            else:
                aside.append(raw)
        if aside:  # first the copy, then the cut: a crash between the two duplicates lines but loses none
            with open(discarded_path(self.path), "ab") as file:
                file.writelines(aside)
                file.flush()
                os.fsync(file.fileno())
        if aside or damaged:
            write_atomically(self.path, b"".join(keep))
        return len(aside), damaged

    def write(self, step: int, metrics: Mapping[str, Any]) -> bytes:
        """Append `{"step", "time", **metrics}`; returns the line."""
        line = encode_line({"step": int(step), "time": round(time.time(), 3), **metrics})
        self._append(line)
        return line

    def event(self, kind: str, message: str, step: int) -> None:
        """Append an event line and push it to the disk at once: events explain crashes."""
        self.write(step, {"event": kind, "message": message})
        self.sync()

    def rewind(self, step: int, message: str) -> None:
        """Go back to `step` inside a living run (after a loss explosion, say): later lines are set aside."""
        self._flush()
        os.close(self._fd)
        discarded, _ = self._cut(step)
        self._open()
        self.event("rollback", f"{message}; {discarded} lines moved to {discarded_path(self.path).name}", step)

    def _append(self, line: bytes) -> None:
        self._pending.append(line)
        self._flush()

    def _flush(self) -> None:
        while self._pending:
            line = self._pending[0]
            try:
                written = os.write(self._fd, line)
                if written != len(line):
                    raise OSError(28, "short write")
            except OSError as error:
                self._refused(error)
                return
            self._end += len(line)
            self._pending.pop(0)
        self._complained = False

    def _refused(self, error: OSError) -> None:
        try:
            os.ftruncate(self._fd, self._end)  # no half line may stay in the file
        except OSError:
            log.debug("could not cut a half-written line of %s", self.path)
        if not self._complained:
            log.warning("%s could not be written (%s); metrics wait in memory and are tried again", self.path, error)
            self._complained = True
        if len(self._pending) > PENDING_LINES:
            self._pending.pop(0)
            self.lost += 1

    def sync(self) -> None:
        """Ask the disk to keep what was written; a refusal is not an error here."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            log.debug("fsync of %s failed: %s", self.path, error)

    def close(self) -> None:
        """Write what waits, sync and close; safe to call twice."""
        if self._fd < 0:
            return
        self._flush()
        self.sync()
        self.lost += len(self._pending)
        self._pending.clear()
        os.close(self._fd)
        self._fd = -1
