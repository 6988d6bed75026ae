"""Multi-token prediction: one more layer that learns, beside the main task, to predict the token after the next.

    x_i = W [norm h_i ; norm e_{i+1}];  x += GatedMLA(norm x);  x += LatentMoE(norm x);  p(token i+2) = head(norm x_i)

h is the mix over depth that the model's own head reads, e the token embeddings; embedding and head are the model's
(DeepSeek-V3's form; K3's report says one such layer was trained and gives no details, spec 8 row 15). Inside is a plain
residual stream. The layer is there for training alone: evaluation, generation and exports leave it out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from k3train.model.context import ModelContext, PackedStream
from k3train.model.gated_mla import GatedMLA
from k3train.model.latent_moe import LatentMoE
from k3train.model.recompute import region
from k3train.parallel.exchange import gather_rows
from k3train.parallel.layout import Layout


@dataclass
class Further:
    """What the tokens after the next are, on this rank: labels int64 [T], mask fp32 [T] (0 where a document ends
    first). within: bool [T], whether the next token is of the same document. loss: their masked cross entropy, summed,
    once the model has run."""

    labels: torch.Tensor
    mask: torch.Tensor
    within: torch.Tensor
    loss: torch.Tensor | None = None


def further(labels: torch.Tensor, mask: torch.Tensor, stream: PackedStream, start: int, length: int) -> Further:
    """Targets of tokens [start, start + length) from labels and loss mask [T] of the whole stream.

    The label of the next token is the one after next, where both tokens are of one document.
    """
    documents = stream.document_ids()
    within = torch.zeros_like(mask, dtype=torch.bool)
    within[:-1] = documents[1:] == documents[:-1]
    targets = (labels.roll(-1), mask.roll(-1) * within, within)
    return Further(*(t.narrow(0, start, length) for t in targets))


def next_rows(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[T_local, d] -> the row of the token after each, whoever holds it; zeros after the stream's last token."""
    sizes = layout.sizes
    parts = sizes.tensor if sizes.sequence_parallel else 1
    part = layout.tp.rank() if parts > 1 else 0
    first = gather_rows(x[:1], layout.tp) if parts > 1 else x[:1]  # of every tensor rank's part of this slice
    slices = gather_rows(first[:1], layout.cp) if sizes.context > 1 else first[:1]  # of every slice of the stream
    if part + 1 < parts:
        place = part + 1
    else:
        place = parts + layout.cp.rank() + 1 if layout.cp.rank() + 1 < sizes.context else -1
    # every rank takes part in every exchange's backward, whichever row it chose
    following = torch.cat([first, slices, torch.zeros_like(x[:1])])[place].unsqueeze(0)
    return torch.cat([x[1:], following])


class MultiTokenPrediction(nn.Module):
    """h, e [T_local, d] -> what the head reads [T_local, d]. `layer` names it among routers and statistics."""

    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__()
        self.ctx, self.layer = ctx, layer
        width, eps, norm = ctx.model.hidden_size, ctx.model.norm_eps, ctx.backend.norm
        self.hidden_norm, self.embedding_norm = norm(ctx, width, eps=eps), norm(ctx, width, eps=eps)
        self.projection = ctx.backend.replicated(ctx, 2 * width, width)
        self.input_norm, self.post_attention_norm = norm(ctx, width, eps=eps), norm(ctx, width, eps=eps)
        self.attention, self.moe = GatedMLA(ctx, layer), LatentMoE(ctx, layer)
        self.final_norm = norm(ctx, width, eps=eps)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, stream: PackedStream) -> torch.Tensor:
        assert stream.further is not None
        layout, within = self.ctx.layout, stream.further.within[:, None]
        if layout.sizes.sequence_parallel:
            within = within.chunk(layout.sizes.tensor)[layout.tp.rank()]

        def run(hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
            following = next_rows(embedded, layout) * within  # nothing follows the last of a document
            x = self.projection(torch.cat([self.hidden_norm(hidden), self.embedding_norm(following)], dim=-1))
            x = x + self.attention(self.input_norm(x), stream)
            x = x + self.moe(self.post_attention_norm(x), stream)
            return self.final_norm(x)

        again = self.ctx.computed_again(self.layer)
        return region(self.ctx, run, hidden, embedded) if again else run(hidden, embedded)
