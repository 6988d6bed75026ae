"""Write a sharded checkpoint folder that is whole or visibly unfinished, in parallel, and resume it after a kill.

The plan (which tensor in which file) depends on the model alone, never on how many processes write. Each process writes
its own shards and notes every finished one in its journal; whoever finishes last finds nothing left to do. The index,
without which no reader takes the folder for a checkpoint, is written last, from the headers of the files on the disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError, safe_open
from torch import Tensor

from k3train.durable import file_sha256, write_atomically
from k3train.errors import WeightsError
from k3train.weights.shards import (
    Shard,
    TensorSpec,
    plan_shards,
    read_header,
    write_shard,
)

INDEX = "model.safetensors.index.json"
WORK = ".k3train-unfinished"  # exists exactly while a folder is being written
FINGERPRINT = "k3train_fingerprint"


@dataclass
class WriteResult:
    """What `FolderWriter.finish` reports."""

    folder: Path
    tensors: int
    nbytes: int
    shards: int
    reused: int  # shards that an interrupted run had left complete


class FolderWriter:
    """One process's part in writing a folder; construct it with the same arguments in each of `world` processes."""

    def __init__(
        self,
        folder: Path,
        specs: Iterable[TensorSpec],
        *,
        identity: Mapping[str, Any],
        shard_bytes: int = 5_000_000_000,
        rank: int = 0,
        world: int = 1,
        group: Callable[[TensorSpec], object] | None = None,
    ) -> None:
        """`identity` says what is written from what (JSON values); a folder begun with another identity is refused."""
        self.folder, self.rank, self.world = folder, rank, world
        self.shards = plan_shards(specs, shard_bytes, group)
        self.fingerprint = _fingerprint(self.shards, identity)
        self.reused = 0
        self._journal: TextIO | None = None
        self._trusted: dict[str, str] = {}
        self.watch: Callable[[], None] = lambda: None  # called while waiting; raises when the others cannot finish
        self.complete = self._open(identity)

    @property
    def work(self) -> Path:
        return self.folder / WORK

    @property
    def own(self) -> list[Shard]:
        """The shards of this process."""
        return self.shards[self.rank :: self.world]

    def pending(self) -> list[Shard]:
        """This process's shards that still have to be written, after checking the bytes of those that need not."""
        if self.complete:
            return []
        done = self.journaled()
        left = []
        for shard in self.own:
            sha = done.get(shard.file)
            if sha is None or self._fault(shard, sha) is not None:
                left.append(shard)
            elif shard.file not in self._trusted:
                self._trusted[shard.file] = sha
                self.reused += 1
        free = shutil.disk_usage(self.folder).free
        need = sum(shard.nbytes for shard in left)
        if need > free:
            raise WeightsError(
                f"{self.folder}: {need:,} bytes are to be written and {free:,} are free; "
                "free some space or name another output"
            )
        return left

    def write(
        self,
        shard: Shard,
        produce: Callable[[TensorSpec], Tensor],
        note: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Write one shard, open it again, compare names, shapes, dtypes and checksum, and journal it.

        `note` is called after the last tensor; what it returns (JSON values) is kept in the journal, for `notes`.
        """
        sha = write_shard(self.folder / shard.file, shard.tensors, produce)
        fault = self._fault(shard, sha)
        if fault is not None:
            raise WeightsError(f"{self.folder / shard.file}: {fault} right after writing it; the disk is not reliable")
        assert self._journal is not None
        entry = {"file": shard.file, "sha256": sha, "note": {} if note is None else dict(note())}
        self._journal.write(json.dumps(entry) + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self._trusted[shard.file] = sha

    def journaled(self) -> dict[str, str]:
        """Finished shards of all processes: file -> SHA-256."""
        return {entry["file"]: entry["sha256"] for entry in self._journal_entries()}

    def notes(self) -> dict[str, Any]:
        """The notes of all finished shards in the order of the shards, merged into one dictionary."""
        of_file = {entry["file"]: entry.get("note", {}) for entry in self._journal_entries()}
        merged: dict[str, Any] = {}
        for shard in self.shards:
            merged |= of_file.get(shard.file, {})
        return merged

    def _journal_entries(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self.work.glob("journal-*.jsonl")):
            for line in path.read_text().splitlines():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    continue  # the kill came in the middle of a line: that shard counts as unwritten

    def wait(self, shards: Iterable[Shard], *, patience: float = 3600.0) -> None:
        """Return when every one of `shards` is journaled. Raises WeightsError after `patience` seconds of silence."""
        missing = {shard.file for shard in shards}
        last, seen = time.monotonic(), -1
        while missing and not self.complete:
            done = self.journaled()
            if missing <= done.keys():
                return
            self.watch()
            if len(done) != seen:
                last, seen = time.monotonic(), len(done)
            if time.monotonic() - last > patience:
                names = sorted(missing - done.keys())
                raise WeightsError(
                    f"no shard was finished for {patience:.0f} s; still missing {names[:3]} ({len(names)})"
                )
            time.sleep(0.05)

    def finish(self, files: Mapping[str, bytes], *, patience: float = 3600.0) -> WriteResult:
        """Wait for all shards, then (rank 0) add the small `files` and, last, the index. Returns the sums."""
        result = WriteResult(
            self.folder,
            sum(len(shard.tensors) for shard in self.shards),
            sum(shard.nbytes for shard in self.shards),
            len(self.shards),
            len(self.shards) if self.complete else self.reused,
        )
        if not self.complete and self.rank == 0:
            self.wait(self.shards, patience=patience)
            self._write_index(files)
            self._remove_work()
        self.close()
        return result

    def close(self) -> None:
        """Release this process's journal; an unfinished folder stays resumable."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _remove_work(self) -> None:
        # On NFS a file that another process still has open lingers under another name: give it time to close.
        for pause in (0.05, 0.2, 1.0, 5.0):
            shutil.rmtree(self.work, ignore_errors=True)
            if not self.work.exists():
                return
            time.sleep(pause)
        shutil.rmtree(self.work)

    def _write_index(self, files: Mapping[str, bytes]) -> None:
        weight_map: dict[str, str] = {}
        for shard in self.shards:
            fault = self._fault(shard, None)
            if fault is not None:
                raise WeightsError(f"{self.folder / shard.file}: {fault}; delete it and run the same command again")
            weight_map |= {spec.name: shard.file for spec in read_header(self.folder / shard.file)}
        for name, data in files.items():
            write_atomically(self.folder / name, data)
        total = sum(shard.nbytes for shard in self.shards)
        index = {"metadata": {"total_size": total, FINGERPRINT: self.fingerprint}, "weight_map": weight_map}
        write_atomically(self.folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")

    def _fault(self, shard: Shard, sha256: str | None) -> str | None:
        """What is wrong with a shard on the disk, or None. With `sha256` its bytes are read and compared too."""
        path = self.folder / shard.file
        try:
            if read_header(path) != list(shard.tensors):
                return "holds other tensors than planned"
            with safe_open(path, "pt") as file:  # the reference reader must agree
                if set(file.keys()) != {spec.name for spec in shard.tensors}:
                    return "holds other tensors than planned"
        except (WeightsError, SafetensorError, OSError) as error:
            return str(error)
        if sha256 is not None and self._trusted.get(shard.file) != sha256 and file_sha256(path) != sha256:
            return "its checksum differs from what was written"
        return None

    def _open(self, identity: Mapping[str, Any]) -> bool:
        """Begin or resume; True when the folder is already whole and of the same fingerprint."""
        plan = self.work / "plan.json"
        if not self.work.exists() and (self.folder / INDEX).exists():
            self._refuse_unless_same(_index_fingerprint(self.folder / INDEX), {})
            for shard in self.shards:
                fault = self._fault(shard, None)
                if fault is not None:
                    raise WeightsError(f"{self.folder / shard.file}: {fault}; delete the folder and export again")
            return True
        if not self.work.exists() and self.folder.exists() and any(self.folder.glob("*.safetensors")):
            raise WeightsError(
                f"{self.folder} holds safetensors files of unknown origin; name another output or empty it"
            )
        self.work.mkdir(parents=True, exist_ok=True)
        if plan.exists():
            begun = json.loads(plan.read_text())
            self._refuse_unless_same(begun.get("fingerprint"), begun.get("identity", {}))
        else:
            content = {"fingerprint": self.fingerprint, "identity": dict(identity)}
            # Several processes may write it at once, each the same bytes under its own temporary name.
            part = plan.with_name(f"plan.{self.rank}")
            write_atomically(part, json.dumps(content, indent=2).encode())
            part.replace(plan)
        self._journal = open(self.work / f"journal-{self.rank:05d}.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise WeightsError(
                f"{self.folder}: another process is writing this folder as rank {self.rank} of {self.world}"
            ) from None
        if self._journal.tell():
            self._journal.write("\n")  # in case the last line was cut
        return False

    def _refuse_unless_same(self, fingerprint: str | None, identity: Mapping[str, Any]) -> None:
        if fingerprint != self.fingerprint:
            what = f" ({json.dumps(identity)})" if identity else ""
            raise WeightsError(
                f"{self.folder} holds the {'unfinished ' if identity else ''}output of something else{what}; "
                "name another output, or delete the folder first"
            )


def _fingerprint(shards: list[Shard], identity: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    for shard in shards:
        digest.update(shard.file.encode())
        for spec in shard.tensors:
            digest.update(f"{spec.name}|{spec.dtype}|{spec.shape}\n".encode())
    return digest.hexdigest()


def _index_fingerprint(path: Path) -> str | None:
    try:
        return json.loads(path.read_text())["metadata"].get(FINGERPRINT)
    except (OSError, ValueError, KeyError, AttributeError):
        return None
