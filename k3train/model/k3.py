"""The K3 language model: one chunk of it a pipeline stage owns, from token ids to the loss of every token."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from torch import nn

from k3train.config.schema import expand_pattern
from k3train.model import recompute
from k3train.model.attention_residuals import DepthAttention, DepthState, uses_kernels
from k3train.model.context import ModelContext, PackedStream
from k3train.model.head import make_head
from k3train.model.layer import K3Layer, mixes_of_blocks
from k3train.model.mtp import MultiTokenPrediction
from k3train.model.parameters import ParameterSpec, annotate
from k3train.parallel.pipeline import Chunk
from k3train.parallel.transport import StageLink


class Embedding(VocabParallelEmbedding):
    """Token ids [T] -> [T_local, d]; rows are split over tensor-parallel ranks."""

    def __init__(self, ctx: ModelContext) -> None:
        model = ctx.model
        super().__init__(
            model.vocab_size, model.hidden_size, init_method=lambda w: w, config=ctx.megatron, tp_group=ctx.layout.tp
        )
        self.ctx = ctx
        spec = ParameterSpec((model.vocab_size, model.hidden_size), tensor_axis=0, std=model.init_std)
        annotate(self.weight, spec)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.ctx.layout.scatter_tokens(super().forward(tokens))


class K3Model(MegatronModule):
    """Layers [chunk.first, chunk.last), with the embedding and the head where the chunk has them.

    Layers are keyed by their global index, so names are the same under every layout.
    """

    def __init__(self, ctx: ModelContext, chunk: Chunk, *, virtual_stage: int | None) -> None:
        super().__init__(ctx.megatron)
        model = ctx.model
        self.ctx, self.chunk, self.vp_stage = ctx, chunk, virtual_stage
        self.pre_process, self.post_process = chunk.embeds, chunk.heads
        self.share_embeddings_and_output_weights = False
        pattern = expand_pattern(model.pattern, model.hybrid)
        if chunk.embeds:
            self.embedding = Embedding(ctx)
        self.layers = nn.ModuleDict({str(i): K3Layer(ctx, i, pattern[i]) for i in range(chunk.first, chunk.last)})
        mixes_of_blocks(list(self.layers.values()))  # type: ignore[arg-type]
        if chunk.heads:
            if model.attention_residuals != "off":
                self.output_residual = DepthAttention(ctx, "output")
            self.final_norm = ctx.backend.norm(ctx, model.hidden_size, eps=model.norm_eps)
            self.lm_head = make_head(ctx)
            if model.mtp_layers:
                self.mtp = MultiTokenPrediction(ctx, len(pattern))
        self.input_tensor: torch.Tensor | None = None
        self.link: StageLink | None = None  # the borders with the stages before and after, set where there are any

    def set_input_tensor(self, input_tensor: list[torch.Tensor | None] | torch.Tensor | None) -> None:
        """Called by megatron's schedules with what the stage before sent."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None, stream: PackedStream) -> torch.Tensor:
        """tokens, labels int64 [T] of this rank's slice -> loss fp32 [T] (labels given), logits [T, V / TP] (none
        given), or the packed depth state [n * T_local, 1, d] for the next stage."""
        embedded = None
        if self.pre_process:
            embedded = self.embedding(tokens)
            state = DepthState(partial=embedded)
        else:
            assert self.input_tensor is not None and self.link is not None
            sources = self.link.receive(self.input_tensor)
            state = DepthState(bank=sources[:-1], partial=sources[-1])
        state = self.run_layers(state, stream)
        if not self.post_process:
            assert self.link is not None
            return self.link.send(state.sources())
        if stream.further is not None:
            # with attention residuals the embedding is the first source of every stage
            self.predict_further(state, embedded if not state.bank else state.bank[0], stream)
        hidden = self.ctx.layout.enter_tensor_parallel(self.normed_output(state))
        return self.lm_head(hidden, labels, stream.loss_weight)

    def predict_further(self, state: DepthState, embedded: torch.Tensor | None, stream: PackedStream) -> None:
        """Leave the loss of the tokens after the next in `stream.further`."""
        assert stream.further is not None and embedded is not None
        targets = stream.further
        hidden = self.ctx.layout.enter_tensor_parallel(self.mtp(self.read_out(state), embedded, stream))
        targets.loss = (self.lm_head(hidden, targets.labels, targets.mask) * targets.mask).sum()

    def run_layers(self, state: DepthState, stream: PackedStream) -> DepthState:
        return recompute.run_layers(self.ctx, list(self.layers.values()), state, stream)  # type: ignore[arg-type]

    def read_out(self, state: DepthState) -> torch.Tensor:
        if self.ctx.model.attention_residuals == "off":
            assert state.partial is not None
            return state.partial
        return self.output_residual(state)

    def normed_output(self, state: DepthState) -> torch.Tensor:
        """What the head reads [T_local, d]."""
        source = state.sources()[-1]
        if self.ctx.model.attention_residuals != "off" and uses_kernels(source):
            return self.output_residual.read(state, self.final_norm)
        return self.final_norm(self.read_out(state))
