"""How a batch or a packed stream is cut into chunks: one padded list, ordered so that the state scan is short.

Every document is cut from its own start into chunks of C rows, the last one padded. Chunks are ordered by position in
their document first (all first chunks, then all second ones, ...), documents by falling length. So the state scan takes
as many steps as the longest document has chunks, and each step works on one contiguous slice of the list.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkPlan:
    """Index tables of one cut. Rows of a per-head tensor [T, heads, D] are numbered token * heads + head."""

    chunk: int
    documents: int
    steps: tuple[tuple[int, int], ...]  # chunk ranges of each scan step
    order: Tensor  # [N] documents by falling number of chunks; empty ones last
    order_inverse: Tensor  # [N]
    live: int  # documents that are not empty
    gather_value: Tensor  # [chunks * HV * C] row of [T, HV, *] for each row of the chunk list
    gather_key: Tensor  # the same for [T, H, *]: heads repeated for their group of value heads
    scatter: Tensor  # [T * HV] row of the chunk list for each row of [T, HV, *]
    padding: Tensor  # [any] rows of the chunk list that lie past their document's end

    @property
    def chunks(self) -> int:
        return self.steps[-1][1] if self.steps else 0

    def remaining(self, step: int) -> int:
        """Documents that go on after this scan step."""
        if step + 1 == len(self.steps):
            return 0
        begin, end = self.steps[step + 1]
        return end - begin

    def enter(self, states: Tensor) -> Tensor:
        """States [N, HV, K, V] as rows [live * HV, K, V] in the order of the scan."""
        return states.index_select(0, self.order[: self.live]).flatten(0, 1)

    def leave(self, rows: Tensor, states: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Rows of the scan as states [N, HV, K, V] = shape; an empty document hands its state (or zero) through."""
        result = rows.view(self.live, *shape[1:])
        if self.live < self.documents:
            rest = rows.new_zeros(self.documents - self.live, *shape[1:])
            if states is not None:
                rest = states.index_select(0, self.order[self.live :])
            result = torch.cat([result, rest])
        return result.index_select(0, self.order_inverse)

    def to_chunks(self, x: Tensor, keys: bool = False) -> Tensor:
        """[T, heads, D] as [chunks * HV, C, D]; padded rows repeat a token of their document."""
        rows = x.reshape(-1, x.shape[-1]).index_select(0, self.gather_key if keys else self.gather_value)
        return rows.view(-1, self.chunk, x.shape[-1])

    def clear_padding(self, x: Tensor) -> Tensor:
        """Zeroes the padded rows of [chunks * HV, C, D] in place."""
        if self.padding.numel():
            x.view(-1, x.shape[-1]).index_fill_(0, self.padding, 0)
        return x

    def to_stream(self, x: Tensor, value_heads: int, heads: int) -> Tensor:
        """[chunks * HV, C, D] as [T, heads, D], summed over the value heads of each head."""
        x = x.view(-1, x.shape[-1]).index_select(0, self.scatter).view(-1, value_heads, x.shape[-1])
        return x if heads == value_heads else x.unflatten(1, (heads, value_heads // heads)).sum(2)


@lru_cache(maxsize=16)
def plan_chunks(
    bounds: tuple[int, ...], chunk: int, key_heads: int, value_heads: int, device: torch.device
) -> ChunkPlan:
    """The plan for documents with these boundaries (0 ... T) in one flat stream."""
    lengths = [end - start for start, end in zip(bounds, bounds[1:])]
    counts = [-(-length // chunk) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda n: -counts[n])
    live = sum(count > 0 for count in counts)

    steps: list[tuple[int, int]] = []
    starts: list[int] = []
    ends: list[int] = []
    for position in range(max(counts, default=0)):
        begin = len(starts)
        for n in order:
            if counts[n] <= position:
                break
            starts.append(bounds[n] + position * chunk)
            ends.append(bounds[n + 1])
        steps.append((begin, len(starts)))

    rows = torch.arange(chunk)
    token = torch.tensor(starts, dtype=torch.int64).view(-1, 1) + rows  # [chunks, C]
    end = torch.tensor(ends, dtype=torch.int64).view(-1, 1)
    padding = token >= end
    # A padded row repeats the document's own last token, with beta and g set to zero: finite, and no other document's.
    token = torch.minimum(token, end - 1)
    value_head = torch.arange(value_heads).view(1, -1, 1)
    key_head = value_head // (value_heads // key_heads)
    gather_value = token.unsqueeze(1) * value_heads + value_head  # [chunks, HV, C]
    gather_key = token.unsqueeze(1) * key_heads + key_head
    valid = (~padding).unsqueeze(1).expand_as(gather_value)
    scatter = torch.empty(bounds[-1] * value_heads, dtype=torch.int64)
    scatter[gather_value[valid]] = torch.arange(gather_value.numel()).view_as(gather_value)[valid]
    order_ = torch.tensor(order, dtype=torch.int64)
    return ChunkPlan(
        chunk=chunk,
        documents=len(lengths),
        steps=tuple(steps),
        order=order_.to(device),
        order_inverse=torch.argsort(order_).to(device),
        live=live,
        gather_value=gather_value.flatten().to(device),
        gather_key=gather_key.flatten().to(device),
        scatter=scatter.to(device),
        padding=(~valid).flatten().nonzero().flatten().to(device),
    )
