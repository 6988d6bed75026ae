"""Post-training MXFP4 of the routed experts of a Hugging Face folder, shard by shard.

Everything but the routed experts keeps its bytes. Experts that are packed already keep theirs too: a checkpoint that
was trained in 4 bits (as the released K3 was, by quantisation-aware training) must never be searched or rounded again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from k3train.config import hf as hf_config
from k3train.errors import WeightsError
from k3train.weights import mxfp4
from k3train.weights.folder import FolderWriter
from k3train.weights.mxfp4 import Packed, ScaleRule
from k3train.weights.names import Entry
from k3train.weights.quality import Quality, measure
from k3train.weights.quantization_config import quantization_config
from k3train.weights.reader import PACKED, SCALE, HFFolder
from k3train.weights.shards import Shard, TensorSpec

REPORT = "quantization_report.json"
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Plan:
    """What to make of a folder. format: mxfp4, or bf16 (the same values, dequantised, for clients without MXFP4)."""

    method: str = "rtn"
    scales: ScaleRule = "even"
    format: str = "mxfp4"
    shard_bytes: int = 5_000_000_000
    calibration: Mapping[str, Any] | None = None  # identifies the calibration text of gptq


class ExpertQuantiser(Protocol):
    """Turns one matrix of one expert into 4 bits."""

    def __call__(self, entry: Entry, source: HFFolder) -> tuple[Packed, dict[str, Any]]:
        """The packed matrix, on CPU, and what to say about it."""
        ...


class RoundToNearest:
    """Each matrix by itself; needs no data."""

    def __init__(self, scales: ScaleRule, device: torch.device) -> None:
        self.scales, self.device = scales, device

    def __call__(self, entry: Entry, source: HFFolder) -> tuple[Packed, dict[str, Any]]:
        weight = source.read(entry.ours, entry.expert).to(self.device)
        packed = mxfp4.quantise(weight, scales=self.scales, name=entry.hf)
        about = matrix_note(entry, measure(weight, packed), "rtn")
        return Packed(packed.packed.cpu(), packed.scale.cpu()), about


class QuantisedFolder:
    """One process's part in quantising `source` into `output`; the same bytes for any number of processes."""

    def __init__(self, source: HFFolder, output: Path, plan: Plan, *, rank: int = 0, world: int = 1) -> None:
        """Raises WeightsError before anything is written when an expert cannot be packed or the output is taken."""
        if plan.format not in ("mxfp4", "bf16"):
            raise WeightsError(f"quantize.format={plan.format!r} is unknown; choose mxfp4 or bf16")
        if output.resolve() == source.folder.resolve():
            raise WeightsError(f"{output} is the source; name another quantize.output")
        self.source, self.plan = source, plan
        self._entries: dict[str, Entry] = {}  # of the tensors that are made here
        self._layers: dict[str, int] = {}
        self._held: tuple[Entry, Packed] | None = None
        self._notes: dict[str, Any] = {}
        specs = self._specs()
        identity = {
            "source": str(source.folder.resolve()),
            "config": source.config,
            "plan": {k: v for k, v in vars(plan).items() if k != "shard_bytes"},
        }
        self.writer = FolderWriter(
            output, specs, identity=identity, shard_bytes=plan.shard_bytes, rank=rank, world=world,
            # GPTQ finishes a layer before it looks at the next one, so that no shard may hold two layers.
            group=(lambda spec: self._layers[spec.name]) if plan.method == "gptq" else None,
        )  # fmt: skip

    def shards_of_layer(self, layer: int) -> list[Shard]:
        """The shards of a layer, -1 for embedding and head (gptq only, where no shard spans two layers)."""
        return [shard for shard in self.writer.shards if self._layers[shard.tensors[0].name] == layer]

    def write(self, shard: Shard, quantiser: ExpertQuantiser) -> None:
        """Quantise and write one shard."""
        self._notes = {}
        self.writer.write(shard, lambda spec: self._produce(spec, quantiser), lambda: self._notes)

    def finish(self) -> dict[str, Any]:
        """Wait for the other processes, write the small files and the index; returns the report of the weights."""
        if self.writer.complete or self.writer.rank:
            self.writer.finish({})
            return self.saved_report()
        self.writer.wait(self.writer.shards)
        report = weight_report(self.writer.notes(), self.plan)
        packed = self.plan.format == "mxfp4"
        config = hf_config.with_quantization(self.source.config, quantization_config() if packed else None)
        files = {"config.json": _json(config), REPORT: _json(report)}
        for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            if (self.source.folder / name).is_file():
                files[name] = (self.source.folder / name).read_bytes()
        self.writer.finish(files)
        return report

    def saved_report(self) -> dict[str, Any]:
        """The report that lies in the finished folder; empty where there is none yet."""
        path = self.writer.folder / REPORT
        return json.loads(path.read_text()) if path.is_file() else {}

    def _specs(self) -> list[TensorSpec]:
        specs: list[TensorSpec] = []
        for entry in self.source.table.values():
            layer = int(entry.ours.split(".")[1]) if entry.ours.startswith("layers.") else -1
            if not entry.is_routed_expert:
                specs.append(self.source.files.tensors[entry.hf][0])
                self._layers[entry.hf] = layer
                continue
            out, width = entry.hf_shape
            if width % mxfp4.GROUP:
                raise WeightsError(
                    f"{entry.hf}: {width} input features are no multiple of {mxfp4.GROUP}; MXFP4 cannot pack them"
                )
            made = (
                [
                    TensorSpec(entry.hf + PACKED, torch.uint8, (out, width // 2)),
                    TensorSpec(entry.hf + SCALE, torch.uint8, (out, width // mxfp4.GROUP)),
                ]
                if self.plan.format == "mxfp4"
                else [TensorSpec(entry.hf, torch.bfloat16, entry.hf_shape)]
            )
            specs += made
            self._entries |= {spec.name: entry for spec in made}
            self._layers |= {spec.name: layer for spec in made}
        self._layers |= dict.fromkeys(self.source.skipped, -1)
        specs += [self.source.files.tensors[name][0] for name in self.source.skipped]
        return specs

    def _produce(self, spec: TensorSpec, quantiser: ExpertQuantiser) -> Tensor:
        entry = self._entries.get(spec.name)
        if entry is None:
            return self.source.files.get(spec.name)
        if self._held is None or self._held[0] is not entry:
            if self.source.is_packed(entry):
                packed = Packed(*self.source.read_packed(entry.ours, entry.expert))
                mxfp4.check_packed(packed.packed, packed.scale, entry.hf)
                about = matrix_note(entry, measure(packed.dequantise(name=entry.hf), packed), "kept")
            else:
                packed, about = quantiser(entry, self.source)
            self._held = (entry, packed)
            self._notes |= about
        packed = self._held[1]
        if spec.name.endswith(PACKED):
            return packed.packed
        return packed.scale if spec.name.endswith(SCALE) else packed.dequantise(name=entry.hf)


def round_folder(folder: QuantisedFolder, device: torch.device, progress: Progress | None = None) -> None:
    """Round to nearest every shard of this process."""
    quantiser = RoundToNearest(folder.plan.scales, device)
    pending = folder.writer.pending()
    total = len(folder.writer.own)
    for done, shard in enumerate(pending, total - len(pending) + 1):
        folder.write(shard, quantiser)
        if progress is not None:
            progress(done, total, shard.file)


def matrix_note(entry: Entry, quality: Quality, method: str, **more: Any) -> dict[str, Any]:
    """The journal's line about one matrix: the sums that a report needs."""
    return {entry.hf: {"method": method, **vars(quality), **more}}


def weight_report(notes: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Per matrix, per layer and in all: what 4 bits did to the weights."""
    matrices: dict[str, Any] = {}
    layers: dict[int, Quality] = {}
    whole = Quality()
    methods: dict[str, int] = {}
    for name, note in notes.items():
        sums = {k: v for k, v in note.items() if k in Quality.__dataclass_fields__}
        sums["scale_histogram"] = {int(b): n for b, n in sums["scale_histogram"].items()}
        quality = Quality(**sums)
        rest = {k: v for k, v in note.items() if k not in Quality.__dataclass_fields__}
        matrices[name] = {**rest, **quality.as_dict()}
        layers.setdefault(int(name.split(".layers.")[1].split(".")[0]), Quality()).add(quality)
        whole.add(quality)
        methods[note["method"]] = methods.get(note["method"], 0) + 1
    return {
        "method": plan.method,
        "scales": plan.scales,
        "format": plan.format,
        "note": (
            "Post-training quantisation. The released Kimi K3 weights come from quantisation-aware training: "
            "these numbers say nothing about them. Not run here: vLLM, SGLang."
        ),
        "matrices_by_method": methods,
        "all": whole.as_dict(),
        "layers": [{"layer": layer, **quality.as_dict()} for layer, quality in sorted(layers.items())],
        "matrices": matrices,
        "outputs": None,
        "model": None,
    }


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"
