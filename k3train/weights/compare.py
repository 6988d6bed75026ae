"""What quantisation does to a model: both versions side by side, layer by layer, on held-out text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from k3train.config.schema import ModelConfig
from k3train.model.attention_residuals import DepthState
from k3train.model.latent_moe import dense
from k3train.weights.source import TensorSource
from k3train.weights.streaming import LayerStream, TokenBatch


@dataclass
class LayerError:
    """One mixture-of-experts layer: both versions fed the same input, and each fed its own."""

    layer: int
    relative: float  # |y_q - y| / |y| of the MoE output, same input
    cosine: float  # of the same outputs
    accumulated: float  # |h_q - h| / |h| of the block's running sum, each on its own path
    rerouted: float  # share of expert choices that differ, each on its own path

    def as_dict(self) -> dict[str, Any]:
        return {k: v if k == "layer" else round(v, 6) for k, v in vars(self).items()}


@dataclass
class ModelError:
    """The whole model on held-out tokens; losses in nats a token, KL(reference | quantised) in nats."""

    tokens: int
    loss_reference: float
    loss_quantised: float
    kl_mean: float
    kl_p99: float
    top1_agreement: float

    def as_dict(self) -> dict[str, Any]:
        return {**{k: v if isinstance(v, int) else round(v, 6) for k, v in vars(self).items()},
                "loss_change": round(self.loss_quantised - self.loss_reference, 6)}  # fmt: skip


@dataclass
class Comparison:
    """Per layer, and for the model."""

    layers: list[LayerError] = field(default_factory=list)
    model: ModelError | None = None


@torch.no_grad()
def compare(
    model: ModelConfig,
    reference: TensorSource,
    quantised: TensorSource,
    batches: list[TokenBatch],
    device: torch.device,
    dtype: torch.dtype,
) -> Comparison:
    """Run `batches` through both versions; memory is two layers and two depth states."""
    stream = LayerStream(model, device, dtype)
    result = Comparison()
    ends = stream.ends(reference)
    states = [stream.embed(ends, batches), stream.embed(stream.ends(quantised), batches)]
    del ends
    for index in range(len(stream.pattern)):
        pair = [stream.layer(index, source) for source in (reference, quantised)]
        measured = _LayerSums()
        for b, batch in enumerate(batches):
            seen = []
            for version, layer in enumerate(pair):
                record: dict[str, Any] = {}
                hooks = _record(layer, record)
                states[version][b] = stream.advance(layer, states[version][b], batch)
                for hook in hooks:
                    hook.remove()
                seen.append(record)
            if "output" in seen[0]:
                x, packed = seen[0]["input"]
                measured.add(seen[0]["output"], pair[1].moe(x, packed), states[0][b], states[1][b], seen)
        if measured.signal:
            result.layers.append(measured.result(index))
    result.model = _model_error(stream, [stream.ends(reference), stream.ends(quantised)], states, batches)
    return result


def _record(layer: Any, record: dict[str, Any]) -> list[Any]:
    """Keep input, output and routing of a layer's experts, if it has any."""
    if not hasattr(layer, "moe"):
        return []

    def moe(_module: Any, arguments: Any, output: Tensor) -> None:
        record["input"], record["output"] = arguments, output

    def router(_module: Any, _arguments: Any, output: Any) -> None:
        weights, experts = output
        record["selected"] = dense(weights, experts, layer.moe.router.bias.numel())[1]

    return [layer.moe.register_forward_hook(moe), layer.moe.router.register_forward_hook(router)]


@dataclass
class _LayerSums:
    signal: float = 0.0
    noise: float = 0.0
    product: float = 0.0
    energy: float = 0.0
    path_signal: float = 0.0
    path_noise: float = 0.0
    choices: int = 0
    changed: int = 0

    def add(self, want: Tensor, got: Tensor, h: DepthState, h_q: DepthState, seen: list[dict[str, Any]]) -> None:
        want, got = want.double(), got.double()
        self.signal += want.square().sum().item()
        self.noise += (got - want).square().sum().item()
        self.product += (got * want).sum().item()
        self.energy += got.square().sum().item()
        assert h.partial is not None and h_q.partial is not None
        self.path_signal += h.partial.double().square().sum().item()
        self.path_noise += (h_q.partial.double() - h.partial.double()).square().sum().item()
        self.choices += int(seen[0]["selected"].sum())
        self.changed += int((seen[0]["selected"] & ~seen[1]["selected"]).sum())

    def result(self, layer: int) -> LayerError:
        return LayerError(
            layer,
            math.sqrt(self.noise / self.signal),
            self.product / math.sqrt(self.signal * self.energy) if self.energy else 0.0,
            math.sqrt(self.path_noise / self.path_signal),
            self.changed / max(self.choices, 1),
        )


def _model_error(
    stream: LayerStream, ends: list[Any], states: list[list[DepthState]], batches: list[TokenBatch]
) -> ModelError:
    losses, divergences = [0.0, 0.0], []
    agree = tokens = counted = 0
    for b, batch in enumerate(batches):
        at = 0
        for ref, quant in zip(stream.logits(ends[0], states[0][b]), stream.logits(ends[1], states[1][b])):
            rows = slice(at, at + ref.shape[0])
            at += ref.shape[0]
            labels = batch.labels[rows].to(ref.device)
            use = batch.counted[rows].to(ref.device)
            log_p, log_q = ref.log_softmax(-1), quant.log_softmax(-1)
            for i, log in enumerate((log_p, log_q)):
                picked = log.gather(1, labels[:, None]).squeeze(1)
                losses[i] -= float(picked[use].double().sum())
            divergences.append((log_p.exp() * (log_p - log_q)).sum(-1).cpu())
            agree += int((ref.argmax(-1) == quant.argmax(-1)).sum())
            tokens += ref.shape[0]
            counted += int(use.sum())
    kl = torch.cat(divergences).double()
    n = max(counted, 1)
    return ModelError(
        tokens, losses[0] / n, losses[1] / n, float(kl.mean()), float(torch.quantile(kl, 0.99)), agree / max(tokens, 1)
    )
