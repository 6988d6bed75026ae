"""Which layers a model chunk owns."""

from __future__ import annotations

from dataclasses import dataclass

from k3train.errors import LayoutError


@dataclass(frozen=True)
class Chunk:
    """Layers [first, last) of one virtual stage, whether it embeds tokens, and whether it computes the loss."""

    stage: int  # position in the order data flows: virtual * pipeline + rank
    first: int
    last: int
    embeds: bool
    heads: bool


def split_layers(
    layers: int, chunks: int, layout: str | None = None, costs: list[float] | None = None
) -> list[tuple[int, int]]:
    """Layer ranges of `chunks` stages in the order data flows.

    layout: "E K K K|F K|..." gives each stage's letters (E the embedding, L the head; both optional and only first
    and last). Without it the ranges minimise the largest stage cost (costs[i] of layer i; equal when None).
    Raises LayoutError when they do not fit.
    """
    if layout is not None:
        return _parse_layout(layers, chunks, layout)
    if layers < chunks:
        raise LayoutError(
            f"{layers} layers cannot fill {chunks} pipeline stages; lower parallel.pipeline or parallel.virtual"
        )
    return _balance(costs or [1.0] * layers, chunks)


def _parse_layout(layers: int, chunks: int, layout: str) -> list[tuple[int, int]]:
    ranges, position = [], 0
    stages = layout.split("|")
    if len(stages) != chunks:
        raise LayoutError(
            f"parallel.pipeline_layout names {len(stages)} stages but pipeline * virtual is {chunks}: "
            f"put {chunks - 1} '|' in {layout!r}"
        )
    for number, stage in enumerate(stages):
        letters = [c for c in stage if not c.isspace()]
        extra = {"E"} if number == 0 else set()
        extra |= {"L"} if number == chunks - 1 else set()
        bad = set(letters) - {"K", "F"} - extra
        if bad:
            raise LayoutError(
                f"parallel.pipeline_layout: {sorted(bad)} in stage {number} of {layout!r}; use K and F, E only first, "
                "L only last"
            )
        count = sum(c in "KF" for c in letters)
        ranges.append((position, position + count))
        position += count
    if position != layers:
        raise LayoutError(f"parallel.pipeline_layout holds {position} layers but the model has {layers}: {layout!r}")
    return ranges


def _balance(costs: list[float], chunks: int) -> list[tuple[int, int]]:
    """Contiguous split that minimises the largest sum, every part non-empty (dynamic programming; layers < 200)."""
    n = len(costs)
    prefix = [0.0]
    for c in costs:
        prefix.append(prefix[-1] + c)
    best = [[float("inf")] * (n + 1) for _ in range(chunks + 1)]
    cut = [[0] * (n + 1) for _ in range(chunks + 1)]
    best[0][0] = 0.0
    for part in range(1, chunks + 1):
        for end in range(part, n - (chunks - part) + 1):
            for start in range(part - 1, end):
                worst = max(best[part - 1][start], prefix[end] - prefix[start])
                if worst < best[part][end]:
                    best[part][end], cut[part][end] = worst, start
    ranges, end = [], n
    for part in range(chunks, 0, -1):
        ranges.append((cut[part][end], end))
        end = cut[part][end]
    return ranges[::-1]
