"""Safetensors shards, one tensor at a time: a writer whose memory is one tensor, and headers read without the data.

A safetensors file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, and the
tensors' bytes end to end. Since every name, shape and dtype of a checkpoint is known before its first byte, the header
can be written first and the tensors streamed behind it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from k3train.durable import sync
from k3train.errors import WeightsError

CODES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
    torch.float8_e8m0fnu: "F8_E8M0",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
_MAX_HEADER = 100_000_000  # the limit of the reference implementation
_BUFFER = 1 << 24


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that will be, or is, in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint and the tensors in it, in order."""

    file: str
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)


def plan_shards(
    specs: Iterable[TensorSpec], limit: int, group: Callable[[TensorSpec], object] | None = None
) -> list[Shard]:
    """Fill shards of at most `limit` bytes in order; a larger single tensor gets a shard of its own.

    `group` maps a tensor to a key; shards never span two consecutive keys (layers, for work that goes layer by layer).
    """
    parts: list[list[TensorSpec]] = []
    size, last = 0, object()
    for spec in specs:
        key = group(spec) if group is not None else None
        if not parts or size + spec.nbytes > limit or (group is not None and key != last):
            parts.append([])
            size = 0
        parts[-1].append(spec)
        size += spec.nbytes
        last = key
    count = len(parts)
    return [Shard(f"model-{i:05d}-of-{count:05d}.safetensors", tuple(part)) for i, part in enumerate(parts, 1)]


def encode_header(tensors: Sequence[TensorSpec]) -> bytes:
    """The length prefix and the JSON header of a file with `tensors` end to end, padded to 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in tensors:
        header[spec.name] = {
            "dtype": CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(path: Path, tensors: Sequence[TensorSpec], produce: Callable[[TensorSpec], Tensor]) -> str:
    """Write a complete file and return its SHA-256. `produce` is called once for each tensor, in order.

    The file appears under its name only after its last byte is on the disk; before, it is `path` + ".part". A full disk
    raises WeightsError and leaves nothing behind.
    """
    part = path.with_name(path.name + ".part")
    digest = hashlib.sha256()
    try:
        with open(part, "wb") as file:

            def emit(data: bytes | memoryview) -> None:
                digest.update(data)
                file.write(data)

            emit(encode_header(tensors))
            for spec in tensors:
                tensor = produce(spec)
                if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
                    raise WeightsError(
                        f"{spec.name}: planned as {spec.dtype} {list(spec.shape)}, "
                        f"got {tensor.dtype} {list(tensor.shape)}"
                    )
                raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                view = memoryview(raw.numpy())
                for i in range(0, len(view), _BUFFER):
                    emit(view[i : i + _BUFFER])
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        part.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need = sum(spec.nbytes for spec in tensors)
            raise WeightsError(
                f"the disk of {path.parent} is full while writing {path.name} ({need:,} bytes); "
                "free some space and run the same command again: it goes on with this shard"
            ) from error
        raise
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    part.replace(path)
    sync(path.parent)
    return digest.hexdigest()


def read_header(path: Path) -> list[TensorSpec]:
    """The tensors of a safetensors file, in the order of their bytes. Reads no data.

    Raises WeightsError when the file is truncated, has bytes too many, or is no safetensors file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise WeightsError(f"{path}: truncated or no safetensors file ({size:,} bytes)")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = []
        for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if info["dtype"] not in DTYPES:
                raise WeightsError(f"{path}: {name} has dtype {info['dtype']}, which no tensor of this model has")
            tensors.append((TensorSpec(name, DTYPES[info["dtype"]], tuple(info["shape"])), info["data_offsets"]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{path}: the header is damaged ({error}); fetch or export the file again") from error
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror or error})") from error
    at = 0
    for spec, (begin, end) in tensors:
        if begin != at or end - begin != spec.nbytes:
            raise WeightsError(f"{path}: the header is damaged at {spec.name}; fetch or export the file again")
        at = end
    if size != 8 + length + at:
        what = "truncated" if size < 8 + length + at else "too long"
        raise WeightsError(
            f"{path}: {what}: {size:,} bytes, its header describes {8 + length + at:,}; fetch or export it again"
        )
    return [spec for spec, _ in tensors]
