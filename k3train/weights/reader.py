"""Read a Hugging Face folder of Kimi K3 or Kimi Linear, strictly: everything that does not fit is an error with a name.

Only JSON and safetensors are read; nothing is unpickled and no code from the folder runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from k3train.config import hf as hf_config
from k3train.errors import WeightsError
from k3train.weights import mxfp4
from k3train.weights.folder import INDEX, WORK
from k3train.weights.names import FOREIGN_PREFIXES, Entry, entries
from k3train.weights.shards import TensorSpec, read_header
from k3train.weights.source import check_finite

SINGLE = "model.safetensors"
PACKED, SCALE = "_packed", "_scale"  # suffixes behind `.weight` of an MXFP4 tensor
_STORED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class CheckpointFiles:
    """The tensors of a folder of safetensors files, located and consistent with its index. Holds no data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        if not folder.is_dir():
            raise WeightsError(f"{folder} is not a folder; give the folder of a Hugging Face checkpoint")
        if (folder / WORK).exists():
            raise WeightsError(
                f"{folder} is an unfinished export: run the same `k3train` command again, it goes on where it stopped"
            )
        self.tensors: dict[str, tuple[TensorSpec, str]] = {}
        for file in self._files():
            for spec in read_header(folder / file):
                if spec.name in self.tensors:
                    raise WeightsError(f"{folder}: {spec.name} is in {self.tensors[spec.name][1]} and in {file}")
                self.tensors[spec.name] = (spec, file)
        self._compare_with_index()

    def get(self, name: str) -> Tensor:
        """A stored tensor, whole, on CPU."""
        try:
            return self._handle(name).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self.folder / self.tensors[name][1]}: {name} cannot be read ({error})") from error

    def get_part(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        """Indices start..stop of one axis of a stored tensor; the rest is not read."""
        try:
            part = self._handle(name).get_slice(name)
            return part[(slice(None),) * axis + (slice(start, stop),)]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self.folder / self.tensors[name][1]}: {name} cannot be read ({error})") from error

    def close(self) -> None:
        """Forget the open files (they are memory maps)."""
        self._open.clear()

    def _handle(self, name: str) -> Any:
        file = self.tensors[name][1]
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, "pt")
        return self._open[file]

    def _files(self) -> list[str]:
        self.index: dict[str, str] | None = None
        path = self.folder / INDEX
        if path.exists():
            content = read_json(path)
            self.index = content.get("weight_map")
            if not isinstance(self.index, dict) or not self.index:
                raise WeightsError(f"{path}: no weight_map; the index is damaged")
            files = sorted(set(self.index.values()))
            for file in files:
                if Path(file).name != file:
                    raise WeightsError(f"{path}: {file!r} is not the name of a file in this folder")
                if not (self.folder / file).exists():
                    raise WeightsError(f"{self.folder}: the index names {file}, which is missing; fetch it")
            return files
        if (self.folder / SINGLE).exists():
            return [SINGLE]
        others = sorted(p.name for p in self.folder.glob("*.safetensors"))
        hint = f"; {len(others)} safetensors files without their index: fetch {INDEX}" if others else ""
        raise WeightsError(f"{self.folder} holds neither {INDEX} nor {SINGLE}{hint}")

    def _compare_with_index(self) -> None:
        if self.index is None:
            return
        for name, file in self.index.items():
            if name not in self.tensors or self.tensors[name][1] != file:
                where = f"it is in {self.tensors[name][1]}" if name in self.tensors else "no file has it"
                raise WeightsError(f"{self.folder}: the index places {name} in {file}, but {where}")
        extra = [name for name in self.tensors if name not in self.index]
        if extra:
            raise WeightsError(f"{self.folder}: {_some(extra)} in the files and not in the index")


class HFFolder:
    """A checkpoint of the text backbone, checked against its config.json; a `TensorSource` under our names.

    model: our configuration. format: kimi_k3 or kimi_linear. packed: whether routed experts are MXFP4.
    skipped: tensors of the vision tower, which the text backbone does not have.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.files = CheckpointFiles(self.folder)
        self.config = read_json(self.folder / "config.json")
        self.format = hf_config.format_from(self.config)
        self.model = hf_config.from_hf(self.config, name=self.folder.name)
        self.tokens = hf_config.special_tokens(self.config)
        self.table: dict[tuple[str, int | None], Entry] = {}
        self._stacks: dict[str, int] = {}
        for entry in entries(self.model, self.format):
            self.table[entry.ours, entry.expert] = entry
            if entry.expert is not None:
                self._stacks[entry.ours] = max(self._stacks.get(entry.ours, 0), entry.expert + 1)
        self.skipped = [name for name in self.files.tensors if name.startswith(FOREIGN_PREFIXES)]
        self._check_tensors()
        self._check_quantization()
        for entry in self.table.values():
            if entry.ours.endswith("A_log"):
                self.read(entry.ours)  # refuses padding that is not zero

    def names(self) -> Iterable[str]:
        """Our names of everything the checkpoint holds; stacked experts once."""
        return dict.fromkeys(name for name, _ in self.table)

    def is_packed(self, entry: Entry) -> bool:
        """Whether this tensor is stored as MXFP4."""
        return entry.hf + PACKED in self.files.tensors

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """Our tensor `name` in its stored dtype (MXFP4 decodes to bfloat16, exactly); of a stack, one expert or all."""
        if expert is None and name in self._stacks:
            return torch.stack([self.read(name, i) for i in range(self._stacks[name])])
        entry = self._entry(name, expert)
        if self.is_packed(entry):
            value = mxfp4.dequantise(*self.read_packed(name, expert), name=entry.hf)
        else:
            value = entry.from_hf(self.files.get(entry.hf))
        return check_finite(value, entry.hf, str(self.folder))

    def read_part(self, name: str, axis: int, start: int, stop: int) -> Tensor:
        """`read(name)` narrowed to start..stop of one axis, for a tensor-parallel shard."""
        entry = self._entry(name, None)
        if entry.shape != entry.hf_shape:  # small vectors and convolutions change their shape on the way
            return self.read(name).narrow(axis, start, stop - start)
        part = self.files.get_part(entry.hf, axis, start, stop)
        return check_finite(part, entry.hf, str(self.folder))

    def read_packed(self, name: str, expert: int | None) -> tuple[Tensor, Tensor]:
        """The stored bytes of an MXFP4 tensor: packed uint8 [out, in/2], scale uint8 [out, in/32]."""
        entry = self._entry(name, expert)
        scale = self.files.get(entry.hf + SCALE)
        return self.files.get(entry.hf + PACKED), scale.view(torch.uint8)

    def _entry(self, name: str, expert: int | None) -> Entry:
        try:
            return self.table[name, expert]
        except KeyError:
            where = "" if expert is None else f", expert {expert}"
            raise WeightsError(f"{self.folder}: the model of its config.json has no {name}{where}") from None

    def _check_tensors(self) -> None:
        left = dict(self.files.tensors)
        for name in self.skipped:
            del left[name]
        missing, wrong = [], []
        for entry in self.table.values():
            if entry.hf in left:
                wrong += _complaint(entry, left.pop(entry.hf)[0])
                # A weight stored twice would leave it open which one counts; what remains in `left` is refused below.
            elif entry.is_routed_expert and entry.hf + PACKED in left and entry.hf + SCALE in left:
                packed, scale = left.pop(entry.hf + PACKED)[0], left.pop(entry.hf + SCALE)[0]
                wrong += _packed_complaint(entry, packed, scale)
            else:
                half = [entry.hf + s for s in (PACKED, SCALE) if entry.hf + s in left]
                missing.append(entry.hf + (SCALE if half and half[0].endswith(PACKED) else PACKED if half else ""))
        if missing:
            raise WeightsError(
                f"{self.folder}: missing {_some(missing)}; config.json describes {len(self.table)} tensors"
            )
        if wrong:
            raise WeightsError(
                f"{self.folder}: {wrong[0]}" + (f" ({len(wrong)} such tensors)" if len(wrong) > 1 else "")
            )
        if left:
            raise WeightsError(
                f"{self.folder}: unused {_some(list(left))}: not part of the model that config.json describes"
            )

    def _check_quantization(self) -> None:
        """The quantised set is what is stored packed, never an ignore list; the config must not name another format."""
        packed = [entry for entry in self.table.values() if self.is_packed(entry)]
        self.packed = bool(packed)
        text = hf_config.text_section(self.config)
        declared = text.get("quantization_config", self.config.get("quantization_config"))
        if declared is None:
            if packed:
                raise WeightsError(
                    f"{self.folder}: {packed[0].hf}{PACKED} is packed, but config.json has no quantization_config"
                )
            return
        kind = declared.get("format")
        if kind != "mxfp4-pack-quantized":
            raise WeightsError(
                f"{self.folder}: quantization_config.format={kind!r} is not read here; only mxfp4-pack-quantized and "
                "unquantised checkpoints are"
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises WeightsError when it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(
            f"{path} is missing; a Hugging Face folder has config.json beside its .safetensors files"
        ) from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds no JSON object")
    return content


def _complaint(entry: Entry, spec: TensorSpec) -> list[str]:
    try:
        entry.check_shape(spec.shape)
    except WeightsError as error:
        return [str(error)]
    if spec.dtype not in _STORED_DTYPES:
        return [f"{entry.hf}: dtype {spec.dtype} where a floating-point weight is expected"]
    return []


def _packed_complaint(entry: Entry, packed: TensorSpec, scale: TensorSpec) -> list[str]:
    out, width = entry.hf_shape
    want = {PACKED: (out, width // 2), SCALE: (out, width // mxfp4.GROUP)}
    allowed = {PACKED: (torch.uint8,), SCALE: (torch.uint8, torch.float8_e8m0fnu)}
    found = []
    for suffix, spec in ((PACKED, packed), (SCALE, scale)):
        if spec.shape != want[suffix]:
            found.append(f"{spec.name}: shape {list(spec.shape)}, but config.json asks for {list(want[suffix])}")
        elif spec.dtype not in allowed[suffix]:
            found.append(f"{spec.name}: dtype {spec.dtype}, but MXFP4 stores bytes (uint8)")
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
