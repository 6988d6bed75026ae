"""Checkpoints on disk: written beside, checked by a manifest of checksums, renamed when whole, walked back when not.

    checkpoints/step-00000100/   shards, state, manifest.json
    checkpoints/.writing-...     a save in progress or killed: never read, removed by the next save

A folder counts as a checkpoint when its manifest is there and every file has the size it says; checksums are
verified on load. The newest good one is 'latest'; there is no pointer file to go stale.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3train.durable import file_sha256, sync
from k3train.errors import CheckpointError

MANIFEST = "manifest.json"
PREFIX = "step-"
WRITING = ".writing-"


@dataclass(frozen=True)
class Found:
    """A checkpoint whose manifest is there; its checksums are not verified yet."""

    step: int
    path: Path


def step_folder(root: Path, step: int) -> Path:
    return root / f"{PREFIX}{step:08d}"


def writing_folder(root: Path, step: int) -> Path:
    return root / f"{WRITING}{step:08d}"


def list_checkpoints(root: Path) -> list[Found]:
    """Checkpoints that have a manifest, oldest first."""
    found = []
    for path in root.glob(f"{PREFIX}*") if root.is_dir() else []:
        if path.name[len(PREFIX) :].isdigit() and (path / MANIFEST).is_file():
            found.append(Found(int(path.name[len(PREFIX) :]), path))
    return sorted(found, key=lambda f: f.step)


def finish(writing: Path, final: Path, about: dict[str, Any], files: dict[str, dict[str, Any]] | None = None) -> None:
    """Rank 0, after every rank has written: manifest with sizes and checksums, fsync of all, rename.

    files: name -> {"bytes", "sha256"} where the writers have hashed and synced already; None reads every file here.
    """
    if files is None:
        files = {}
        for path in sorted(p for p in writing.rglob("*") if p.is_file() and p.name != MANIFEST):
            files[str(path.relative_to(writing))] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
            sync(path)
    manifest = writing / MANIFEST
    manifest.write_text(json.dumps({**about, "files": files}, indent=1, sort_keys=True))
    sync(manifest)
    sync(writing)
    if final.exists():  # the same step saved again (say, at a stop right after a periodic save)
        _remove(final)
    writing.rename(final)
    sync(final.parent)


def verify(path: Path) -> None:
    """Compare every file with the manifest.

    Raises CheckpointError naming the file that is missing, truncated or changed.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: unreadable {MANIFEST} ({error})") from error
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path}: {name} is missing")
        if file.stat().st_size != expected["bytes"]:
            size = file.stat().st_size
            raise CheckpointError(f"{path}: {name} has {size} bytes, the manifest says {expected['bytes']}")
        if file_sha256(file) != expected["sha256"]:
            raise CheckpointError(f"{path}: {name} does not have the checksum of the manifest")


def newest_good(root: Path, say: Callable[[str], None], before: int | None = None) -> Found | None:
    """The newest checkpoint whose checksums hold, of a step below `before` if given.

    'Newest' is by the step in the name: clocks of nodes and file servers disagree. Damaged ones are named and passed
    over, never deleted.
    """
    for found in reversed(list_checkpoints(root)):
        if before is not None and found.step >= before:
            continue
        try:
            verify(found.path)
            return found
        except CheckpointError as error:
            say(f"checkpoint damaged, walking back: {error}")
    return None


def has_optimizer(path: Path) -> bool:
    """Whether a checkpoint holds optimizer state; imported weights come without."""
    return bool(json.loads((path / MANIFEST).read_text()).get("optimizer", True))


def locate(path: Path, say: Callable[[str], None]) -> Path:
    """A checkpoint folder from a run folder, its checkpoints folder, or the checkpoint itself.

    Raises CheckpointError when there is none.
    """
    if (path / MANIFEST).is_file():
        verify(path)
        return path
    for root in (path / "checkpoints", path):
        found = newest_good(root, say)
        if found is not None:
            return found.path
    raise CheckpointError(f"{path} holds no whole checkpoint; give a run folder, or a {PREFIX}* folder with {MANIFEST}")


def prune(root: Path, keep_last: int, keep_every: int | None) -> list[Path]:
    """Remove checkpoints beyond the newest `keep_last`, sparing multiples of `keep_every`; returns what went."""
    removed = []
    found = list_checkpoints(root)
    for old in found[: max(0, len(found) - max(keep_last, 1))]:
        if keep_every and old.step % keep_every == 0:
            continue
        _remove(old.path)
        removed.append(old.path)
    return removed


def forget_after(root: Path, step: int) -> list[Path]:
    """Remove checkpoints of later steps: the run went back to `step`, and their future did not happen."""
    removed = [found.path for found in list_checkpoints(root) if found.step > step]
    for path in removed:
        _remove(path)
    return removed


def _remove(path: Path) -> None:
    doomed = path.with_name(f"{WRITING}removing-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)  # from here on no reader takes it for whole
    shutil.rmtree(doomed)


def clear_unfinished(root: Path) -> list[Path]:
    """Remove what killed saves left behind."""
    left = list(root.glob(f"{WRITING}*")) if root.is_dir() else []
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return left
