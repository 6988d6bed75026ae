"""What every module of the model is built with: configs, groups, backend, dtypes, and the packing of a micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from k3train.config.activations import computed_again
from k3train.config.schema import ModelConfig
from k3train.parallel.expert_exchange import ExchangePlan
from k3train.parallel.layout import Layout
from k3train.parallel.slices import rounded_up

if TYPE_CHECKING:
    from k3train.model.backend import Backend
    from k3train.model.mtp import Further
    from k3train.parallel.slices import Spans


@dataclass
class ModelContext:
    """Shared by the modules of one rank's model."""

    model: ModelConfig
    megatron: TransformerConfig
    layout: Layout
    backend: Backend
    dtype: torch.dtype
    device: torch.device
    recompute: str = "none"
    recompute_layers: int | None = None
    """Under `recompute` full or unit: only layers of a lower global index are computed again; None: all."""
    activations: dict[str, str] = field(default_factory=dict)
    """Policy by class of tensor; a class that is missing follows `recompute`."""
    exchange: ExchangePlan = field(default_factory=ExchangePlan)
    """How rows reach the experts of other ranks, shared by all layers."""
    recomputing: bool = False
    """True while a backward computes activations again: tokens are not counted and nothing is recorded."""
    probe: Callable[[str, torch.Tensor], None] | None = None
    """When set, modules hand it named intermediate tensors (for goldens and statistics)."""

    def computed_again(self, layer: int) -> bool:
        """Whether the backward runs the forward of the whole layer of this global index again (a layer of multi-token
        prediction comes after the model's own)."""
        return computed_again(self.recompute, self.recompute_layers, layer)

    def record(self, name: str, value: torch.Tensor) -> None:
        if self.probe is not None and not self.recomputing:
            self.probe(name, value.detach())


@dataclass
class PackedStream:
    """Where documents begin in a micro-batch of T tokens, all context-parallel ranks together.

    cu_seqlens: int32 [N+1], 0 ... T. sequence_length: T is b sequences of this many tokens and no document crosses
    one (0: unknown). valid: bool [T] of this rank, False for padding that balancing must not count, or None.
    loss_weight: fp32 [T] of this rank, the factor of each token's loss in the sum that is differentiated, which lets the
    head find its gradients with the losses (any multiple of that sum may be walked back); None: any sum of the losses.
    further: the targets of multi-token prediction in a training step, and its loss afterwards; None: not predicted.
    bounds: cu_seqlens on the host, where they were there before they went to a device.
    on_device: under context parallelism, documents are looked up on the device and all shapes follow from the sizes and
    from `spans`, so that a captured step can be replayed with other documents. spans: bounds on documents that hold in
    each of its replays; None: none are known.
    attend: replaces every sequence mixer's forward, for decoding against a cache; called with the module and its input.
    """

    cu_seqlens: torch.Tensor
    total: int
    sequence_length: int = 0
    valid: torch.Tensor | None = None
    loss_weight: torch.Tensor | None = None
    further: Further | None = None
    bounds: Sequence[int] | None = None
    on_device: bool = False
    spans: Spans | None = None
    attend: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None
    cache: dict[str, object] = field(default_factory=dict)

    def longest(self) -> int:
        """A bound on the length of a document: where the host knows them, the next power of two, else a sequence.

        Attention kernels start work for every document as if it were this long, and libraries plan anew for every bound.
        """
        most = self.sequence_length or self.total
        if self.bounds is None:
            return most
        if "longest" not in self.cache:
            length = max(b - a for a, b in itertools.pairwise(self.bounds))
            self.cache["longest"] = min(most, rounded_up(length))
        longest = self.cache["longest"]
        assert isinstance(longest, int)
        return longest

    def document_ids(self) -> torch.Tensor:
        """int32 [T]: the document of each token of the whole stream."""
        if "document_ids" not in self.cache:
            positions = torch.arange(self.total, device=self.cu_seqlens.device, dtype=torch.int32)
            boundaries = self.cu_seqlens[1:].to(torch.int32)
            self.cache["document_ids"] = torch.bucketize(positions, boundaries, right=True)
        ids = self.cache["document_ids"]
        assert isinstance(ids, torch.Tensor)
        return ids
