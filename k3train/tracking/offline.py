"""Read an offline W&B run back without a server, to prove that the mirror holds what `metrics.jsonl` holds.

A `.wandb` file is `:W&B` and three more bytes, then a LevelDB log: 32 KiB blocks of records, each with a 7-byte header
(masked CRC-32C, little-endian length, kind), whose payloads join into `wandb_internal.Record` protobufs.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3train.errors import DataError

_BLOCK = 32_768
_HEADER = struct.Struct("<IHB")
_PADDING, _FULL, _FIRST, _MIDDLE, _LAST = range(5)


@dataclass
class OfflineRun:
    """One `.wandb` file: `history` has a dict per logged step (`_step` included), `config` the run's config."""

    path: Path
    run_id: str = ""
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False


def find_offline_runs(folder: str | os.PathLike[str]) -> list[Path]:
    """All `.wandb` files under a folder, oldest first; the `latest-run` link is passed over."""
    found = [p for p in Path(folder).rglob("*.wandb") if "latest-run" not in p.parts]
    return sorted(found, key=lambda p: (p.parent.name, p.name))


def payloads(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield the raw records; a torn tail (the writer was killed) ends the stream quietly."""
    with open(path, "rb") as file:
        if file.read(7)[:4] != b":W&B":
            raise DataError(f"{path} is not a W&B transaction log; give a file that ends in .wandb")
        position, whole = 7, b""
        while True:
            left = _BLOCK - position % _BLOCK
            if left < _HEADER.size:
                file.read(left)
                position += left
                continue
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return
            _, length, kind = _HEADER.unpack(header)
            body = file.read(length)
            position += _HEADER.size + length
            if len(body) < length:
                return
            if kind == _PADDING:
                continue
            whole = body if kind in (_FULL, _FIRST) else whole + body
            if kind in (_FULL, _LAST):
                yield whole
                whole = b""


def _items(items: Any) -> dict[str, Any]:
    """Key-value items of a record; nested keys come back dotted (`moe/load_table.path`)."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def read_offline_run(path: str | os.PathLike[str]) -> OfflineRun:
    """Parse one `.wandb` file with the protobufs that ship in the wandb wheel."""
    from wandb.proto import wandb_internal_pb2

    run = OfflineRun(Path(path))
    for payload in payloads(path):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            row = _items(record.history.item)
            row.setdefault("_step", record.history.step.num)
            run.history.append(row)
        elif kind == "run":
            run.run_id, run.name = record.run.run_id, record.run.display_name
            run.config.update(_items(record.run.config.update))
        elif kind == "config":
            run.config.update(_items(record.config.update))
        elif kind == "exit":
            run.finished = True
    return run


def read_table(run: OfflineRun, row: dict[str, Any], key: str) -> tuple[list[str], list[list[Any]]]:
    """Columns and cells of a table that a history row refers to, from the run's `files/` folder."""
    relative = row.get(f"{key}.path") or row.get(key, {}).get("path")
    if not relative:
        raise DataError(f"step {row.get('_step')} of {run.path} logged no table {key}")
    content = json.loads((run.path.parent / "files" / relative).read_text())
    return content["columns"], content["data"]
