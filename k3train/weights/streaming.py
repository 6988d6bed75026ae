"""Run a model layer by layer from weights on disk: memory is one layer, and the depth state of the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from k3train.config.schema import ModelConfig, expand_pattern
from k3train.model.attention_residuals import DepthState
from k3train.model.build import make_context
from k3train.model.context import PackedStream
from k3train.model.k3 import K3Model
from k3train.model.layer import K3Layer
from k3train.parallel import layout as layouts
from k3train.parallel.pipeline import Chunk
from k3train.weights.source import TensorSource


@dataclass
class TokenBatch:
    """Sequences of equal length as one packed stream; no document crosses a sequence.

    tokens, labels int64 [T]; counted bool [T], where the label is to be learnt; cu_seqlens int32 [N+1].
    """

    tokens: Tensor
    labels: Tensor
    counted: Tensor
    cu_seqlens: Tensor
    sequence_length: int

    def stream(self, device: torch.device) -> PackedStream:
        return PackedStream(self.cu_seqlens.to(device), self.tokens.numel(), self.sequence_length)


def own_layout() -> layouts.Layout:
    """A layout in which this process holds whole layers, whatever launcher or process group is around it."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    sizes = layouts.Sizes(world=dist.get_world_size())
    if sizes.world == 1 and parallel_state.model_parallel_is_initialized():
        return layouts.Layout(sizes, ProcessGroupCollection.use_mpu_process_groups())
    return layouts.initialize(sizes)


class LayerStream:
    """Builds embedding, layers and head one after the other on `device` in `dtype`."""

    def __init__(self, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.device = model, device
        self.pattern = expand_pattern(model.pattern, model.hybrid)
        self.ctx = make_context(replace(model, backend="torch"), own_layout(), dtype, device)

    @torch.no_grad()
    def ends(self, source: TensorSource) -> K3Model:
        """The model without its layers: embedding and head."""
        with self.device:
            ends = K3Model(self.ctx, Chunk(0, 0, 0, embeds=True, heads=True), virtual_stage=None).eval()
        _fill(ends, "", source, experts=True)
        return ends

    @torch.no_grad()
    def layer(self, index: int, source: TensorSource, *, experts: bool = True) -> K3Layer:
        """Layer `index` with its weights; `experts=False` leaves the routed experts unset."""
        with self.device:
            layer = K3Layer(self.ctx, index, self.pattern[index]).eval()
        _fill(layer, f"layers.{index}.", source, experts=experts)
        return layer

    @torch.no_grad()
    def load_experts(self, layer: K3Layer, source: TensorSource) -> None:
        """Set the routed experts of a layer."""
        for name in ("w1", "w3", "w2"):
            stack = getattr(layer.moe.experts, name)
            for expert in range(stack.shape[0]):
                stack[expert].copy_(source.read(f"layers.{layer.index}.moe.experts.{name}", expert))

    @torch.no_grad()
    def embed(self, ends: K3Model, batches: list[TokenBatch]) -> list[DepthState]:
        """The depth state of every batch in front of layer 0."""
        return [DepthState(partial=ends.embedding(batch.tokens.to(self.device))) for batch in batches]

    @torch.no_grad()
    def advance(self, layer: K3Layer, state: DepthState, batch: TokenBatch) -> DepthState:
        """One batch through one layer; the given state stays usable."""
        return layer(DepthState(list(state.bank), state.partial), batch.stream(self.device))

    @torch.no_grad()
    def logits(self, ends: K3Model, state: DepthState, rows: int = 1024) -> Iterator[Tensor]:
        """Logits float32 of consecutive pieces of at most `rows` tokens, [<= rows, vocabulary] each."""
        hidden = ends.final_norm(ends.read_out(state))
        for part in hidden.split(rows):
            yield ends.lm_head(part).float()


def _fill(module: torch.nn.Module, prefix: str, source: TensorSource, *, experts: bool) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        spec = getattr(tensor, "k3", None)
        if spec is None or (spec.expert and not experts):
            continue
        if spec.expert:
            for expert in range(tensor.shape[0]):
                tensor[expert].copy_(source.read(prefix + name, expert))
        else:
            tensor.copy_(source.read(prefix + name))
