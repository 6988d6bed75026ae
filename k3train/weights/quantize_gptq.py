"""GPTQ for a whole model: each layer's Hessians come from tokens that ran through the 4-bit layers before it.

Per layer: run the calibration tokens up to the router, quantise this process's shards of experts, wait for the others',
load the quantised experts and run the tokens through them. An expert's matrix takes the result of error feedback only
where its output error on tokens that no Hessian has seen is below that of round-to-nearest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3train.model.attention_residuals import DepthState
from k3train.model.latent_moe import dense
from k3train.model.layer import K3Layer
from k3train.model.situ import gated_activation
from k3train.weights import gptq, mxfp4
from k3train.weights.mxfp4 import Packed
from k3train.weights.names import Entry
from k3train.weights.quality import measure
from k3train.weights.quantize import Progress, QuantisedFolder, RoundToNearest, matrix_note
from k3train.weights.reader import HFFolder
from k3train.weights.shards import Shard
from k3train.weights.streaming import LayerStream, TokenBatch
from k3train.weights.writing import FinishedShards


@dataclass
class Calibration:
    """Disjoint tokens. train: of the Hessians. accept: decide between feedback and rounding. judge: measure both."""

    train: list[TokenBatch]
    accept: list[TokenBatch]
    judge: list[TokenBatch]

    def batches(self) -> list[TokenBatch]:
        return [*self.train, *self.accept, *self.judge]


@dataclass
class RoutedInputs:
    """What reaches the routed experts of one layer: z [T, in], weights float32 [T, E], selected bool [T, E]."""

    z: Tensor
    weights: Tensor
    selected: Tensor

    def of_expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """The tokens of one expert [n, in] and their routing weights [n, 1]."""
        rows = self.selected[:, expert].nonzero().squeeze(1)
        return self.z[rows], self.weights[rows, expert].unsqueeze(1)


class ErrorFeedback:
    """The `ExpertQuantiser` of one layer; asked for the three matrices of an expert, it computes them together."""

    def __init__(self, stream: LayerStream, scales: mxfp4.ScaleRule, inputs: list[RoutedInputs]) -> None:
        """`inputs` of the train, accept and judge tokens, in this order."""
        self.model, self.device, self.scales, self.inputs = stream.model, stream.device, scales, inputs
        self.pool = gptq.second_moment(inputs[0].z)
        self._expert: int | None = None
        self._results: dict[str, tuple[Packed, dict[str, Any]]] = {}

    def __call__(self, entry: Entry, source: HFFolder) -> tuple[Packed, dict[str, Any]]:
        if self._expert != entry.expert:
            self._results = self._quantise_expert(entry, source)
            self._expert = entry.expert
        return self._results[entry.ours]

    def _quantise_expert(self, entry: Entry, source: HFFolder) -> dict[str, tuple[Packed, dict[str, Any]]]:
        assert entry.expert is not None
        stack = entry.ours.rpartition(".")[0]
        reached = [inputs.of_expert(entry.expert) for inputs in self.inputs]
        parts = [z for z, _ in reached]
        results = {}
        values: dict[str, Tensor] = {}
        for name in ("w1", "w3", "w2"):
            ours = f"{stack}.{name}"
            if name == "w2":  # reads what the quantised w1 and w3 really produce
                parts = [self._hidden(z, values["w1"], values["w3"], p) for z, p in reached]
            at = source.table[ours, entry.expert]
            weight = source.read(ours, entry.expert).to(self.device)
            packed, about = self._quantise(at.hf, weight, parts, None if name == "w2" else self.pool)
            values[name] = packed.dequantise(torch.float32)
            note = matrix_note(at, measure(weight, packed), about.pop("method"), **about)
            results[ours] = (Packed(packed.packed.cpu(), packed.scale.cpu()), note)
        return results

    def _hidden(self, z: Tensor, w1: Tensor, w3: Tensor, p: Tensor) -> Tensor:
        x = z.float()
        return gated_activation(self.model, x @ w1.T, x @ w3.T) * p

    def _quantise(
        self, name: str, weight: Tensor, parts: list[Tensor], pool: Tensor | None
    ) -> tuple[Packed, dict[str, Any]]:
        train, accept, judge = parts
        rounded = mxfp4.quantise(weight, scales=self.scales, name=name)
        about: dict[str, Any] = {"method": "rtn", "tokens": len(train)}
        if not len(accept) or (pool is None and not len(train)):
            return rounded, about | {"kept_rounding": "too few tokens reach this expert"}
        try:
            hessian = gptq.shrunk_hessian(gptq.second_moment(train), len(train), pool)
            codes = gptq.feedback_codes(weight, rounded.scale, hessian)
        except torch.linalg.LinAlgError:
            return rounded, about | {"kept_rounding": "the Hessian is not positive"}
        candidate = Packed(mxfp4.pack(codes), rounded.scale)
        before, after = rounded.dequantise(torch.float32), candidate.dequantise(torch.float32)
        if gptq.output_error(weight, after, accept)[1] < gptq.output_error(weight, before, accept)[1]:
            about["method"], chosen = "gptq", candidate
        else:
            about["kept_rounding"], chosen, after = "no better on held-out tokens", rounded, before
        if len(judge):  # tokens that neither the Hessian nor the decision has seen
            about["output_sqnr_rtn_db"] = _decibel(*gptq.output_error(weight, before, judge))
            about["output_sqnr_db"] = _decibel(*gptq.output_error(weight, after, judge))
        return chosen, about


@torch.no_grad()
def feed_back_folder(
    folder: QuantisedFolder,
    calibration: Calibration,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    patience: float = 3600.0,
) -> None:
    """Quantise this process's shards; every process runs all calibration tokens through all layers."""
    source, writer = folder.source, folder.writer
    own = {shard.file for shard in writer.own}
    pending = {shard.file for shard in writer.pending()}
    if writer.complete:
        return
    stream = LayerStream(source.model, device, dtype)
    finished = FinishedShards(source, writer)
    batches = calibration.batches()
    states = stream.embed(stream.ends(source), batches)
    done = len(own) - len(pending)

    def write(shard: Shard, quantiser: RoundToNearest | ErrorFeedback) -> None:
        nonlocal done
        folder.write(shard, quantiser)
        done += 1
        if progress is not None:
            progress(done, len(own), shard.file)

    plain = RoundToNearest(folder.plan.scales, device)
    for shard in folder.shards_of_layer(-1):
        if shard.file in pending:
            write(shard, plain)
    for index in range(len(stream.pattern)):
        shards = folder.shards_of_layer(index)
        routed = index >= source.model.dense_layers
        layer = stream.layer(index, source, experts=False)
        todo = [shard for shard in shards if shard.file in pending]
        if routed and todo and not source.packed:
            seen = [routed_inputs(stream, layer, state, batch) for state, batch in zip(states, batches)]
            first, second = len(calibration.train), len(calibration.train) + len(calibration.accept)
            inputs = [_join(part) for part in (seen[:first], seen[first:second], seen[second:])]
            quantiser: RoundToNearest | ErrorFeedback = ErrorFeedback(stream, folder.plan.scales, inputs)
            del seen, inputs
        else:
            quantiser = plain
        for shard in todo:
            write(shard, quantiser)
        if routed:
            writer.wait(shards, patience=patience)
            stream.load_experts(layer, finished)
        states = [stream.advance(layer, state, batch) for state, batch in zip(states, batches)]


def routed_inputs(stream: LayerStream, layer: K3Layer, state: DepthState, batch: TokenBatch) -> RoutedInputs:
    """Run a layer as far as its router, without its experts."""
    seen: list[RoutedInputs] = []

    def instead(z: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        seen.append(RoutedInputs(z, *dense(weights, experts, stream.model.moe.experts)))
        return torch.zeros_like(z)

    layer.moe.routed = instead  # type: ignore[method-assign]
    try:
        stream.advance(layer, state, batch)
    finally:
        del layer.moe.routed
    return seen[0]


def _join(parts: list[RoutedInputs]) -> RoutedInputs:
    return RoutedInputs(
        torch.cat([part.z for part in parts]),
        torch.cat([part.weights for part in parts]),
        torch.cat([part.selected for part in parts]),
    )


def _decibel(signal: float, noise: float) -> float | None:
    return round(10 * math.log10(signal / noise), 4) if signal > 0 and noise > 0 else None
