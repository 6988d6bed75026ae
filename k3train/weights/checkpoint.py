"""Read the weights of a training checkpoint tensor by tensor, from any layout, without building the model.

A checkpoint holds global tensors as rectangular chunks, one a writing rank, in torch's distributed-checkpoint files.
A tensor is put together from the chunks that cover it; nobody needs the ranks, the groups or the memory of the run.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3train.errors import CheckpointError, WeightsError

PREFIX = "model."
_CACHE_BYTES = 6 << 30  # chunks of stacked experts are read once and served expert by expert

_METADATA_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata", "StorageMeta",
        "MetadataIndex", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("pathlib._local", "PosixPath"),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Torch writes the table of chunks as a pickle; nothing but the plain classes of such a table may be in it."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _METADATA_CLASSES or is_dtype:
            return super().find_class(module, name)
        raise CheckpointError(
            f".metadata asks for {module}.{name}, which no checkpoint of ours contains; do not load it"
        )


class CheckpointSource:
    """A `TensorSource` over one checkpoint folder (checkpoints/step-...)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with open(folder / ".metadata", "rb") as file:
                self._metadata = _MetadataUnpickler(file).load()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError) as error:
            raise CheckpointError(f"{folder}: the table of its tensors (.metadata) cannot be read: {error}") from error
        self._stored = {
            (index.fqn, tuple(index.offset)): info
            for index, info in self._metadata.storage_data.items()
            if index.offset is not None
        }
        self._cache: OrderedDict[tuple[str, tuple[int, ...]], Tensor] = OrderedDict()

    def names(self) -> list[str]:
        """Our names of the weights in the checkpoint."""
        keys = self._metadata.state_dict_metadata
        return [key.removeprefix(PREFIX) for key in keys if key.startswith(PREFIX)]

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return tuple(self._entry(name).size)

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """The whole tensor, or one index of its first axis, in the dtype of the checkpoint."""
        entry = self._entry(name)
        shape = tuple(entry.size)
        start, stop = (0, shape[0]) if expert is None else (expert, expert + 1)
        out = torch.empty((stop - start, *shape[1:]), dtype=entry.properties.dtype)
        covered = 0
        for chunk in entry.chunks:
            offset, size = tuple(chunk.offsets), tuple(chunk.sizes)
            low, high = max(start, offset[0]), min(stop, offset[0] + size[0])
            if low >= high:
                continue
            part = self._chunk(PREFIX + name, offset, size)[low - offset[0] : high - offset[0]]
            place = [slice(low - start, high - start), *(slice(o, o + s) for o, s in zip(offset[1:], size[1:]))]
            out[tuple(place)] = part
            covered += part.numel()
        if covered != out.numel():
            raise CheckpointError(
                f"{self.folder}: the chunks of {name} cover {covered} of {out.numel()} values; "
                "the checkpoint is incomplete"
            )
        return out if expert is None else out[0]

    def _entry(self, name: str) -> Any:
        entry = self._metadata.state_dict_metadata.get(PREFIX + name)
        if entry is None or not hasattr(entry, "chunks"):
            raise WeightsError(f"{self.folder} has no tensor {name}; the configuration describes another model")
        return entry

    def _chunk(self, key: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        cached = self._cache.get((key, offset))
        if cached is not None:
            self._cache.move_to_end((key, offset))
            return cached
        info = self._stored[key, offset]
        if Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(f"{self.folder}: {key} lies in {info.relative_path!r}, outside of the checkpoint")
        try:
            with open(self.folder / info.relative_path, "rb") as file:
                file.seek(info.offset)
                data = file.read(info.length)
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.folder / info.relative_path}: {key} cannot be read ({error})") from error
        if tuple(tensor.shape) != size:
            raise CheckpointError(f"{self.folder}: {key} has shape {list(tensor.shape)}, its table says {list(size)}")
        self._cache[key, offset] = tensor
        while len(self._cache) > 1 and sum(t.nbytes for t in self._cache.values()) > _CACHE_BYTES:
            self._cache.popitem(last=False)
        return tensor
