"""Read back what a folder that is still being written already holds."""

from __future__ import annotations

from typing import Any

from safetensors import safe_open
from torch import Tensor

from k3train.weights import mxfp4
from k3train.weights.folder import FolderWriter
from k3train.weights.reader import PACKED, SCALE, HFFolder


class FinishedShards:
    """A `TensorSource`: routed experts from the finished shards of `writer`, everything else from `source`."""

    def __init__(self, source: HFFolder, writer: FolderWriter) -> None:
        self.source, self.folder = source, writer.folder
        self._open: dict[str, Any] = {}
        self._file = {spec.name: shard.file for shard in writer.shards for spec in shard.tensors}

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """As `HFFolder.read`; the shard of the tensor must be finished."""
        if expert is None:
            return self.source.read(name)
        entry = self.source.table[name, expert]
        if entry.hf in self._file:
            return self._get(entry.hf)
        return mxfp4.dequantise(self._get(entry.hf + PACKED), self._get(entry.hf + SCALE), name=entry.hf)

    def _get(self, name: str) -> Tensor:
        file = self._file[name]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, "pt")
        return self._open[file].get_tensor(name)
