"""Which layers a model chunk owns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import inf

from k3train.errors import LayoutError


@dataclass(frozen=True)
class Chunk:
    """Layers [first, last) of one virtual stage, whether it embeds tokens, and whether it computes the loss."""

    stage: int  # position in the order data flows: virtual * pipeline + rank
    first: int
    last: int
    embeds: bool
    heads: bool


EVEN = "even"
"""The layout that pairs chunks by cost."""


def split_layers(
    layers: int, chunks: int, layout: str | None = None, costs: list[float] | None = None, *, pipeline: int = 1
) -> list[tuple[int, int]]:
    """Layer ranges of `chunks` stages in the order data flows.

    layout: "E K K K|F K|..." gives each stage's letters (E the embedding, L the head; both optional and only first
    and last). Without it the ranges minimise the largest stage cost (costs[i] of layer i; equal when None). "even": they
    minimise the time of a step of `pipeline` ranks, which run their chunks of one number at the same time: the sum over
    these numbers of the costliest rank's chunk, and then the largest stage.
    Raises LayoutError when they do not fit.
    """
    if layout is not None and layout != EVEN:
        return _parse_layout(layers, chunks, layout)
    if layers < chunks:
        raise LayoutError(
            f"{layers} layers cannot fill {chunks} pipeline stages; lower parallel.pipeline or parallel.virtual"
        )
    costs = costs or [1.0] * layers
    return _even(tuple(costs), pipeline, chunks // pipeline) if layout == EVEN else _balance(costs, chunks)


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


@lru_cache(maxsize=32)
def _slowest(costs: tuple[float, ...], parts: int) -> list[list[float]]:
    """[i][j]: the largest sum of the best split of the layers [i, j) into `parts`; infinite where they are too few."""
    n = len(costs)
    prefix = [0.0, *accumulate(costs)]
    best = [[prefix[j] - prefix[i] if j > i else inf for j in range(n + 1)] for i in range(n)]
    for _ in range(parts - 1):
        after = [[inf] * (n + 1) for _ in range(n)]
        for i in range(n):
            cut = i  # moves on with j: the first part grows with its end, the last one shrinks
            for j in range(i + 1, n + 1):
                while cut + 1 < j and max(best[i][cut + 1], prefix[j] - prefix[cut + 1]) <= max(
                    best[i][cut], prefix[j] - prefix[cut]
                ):
                    cut += 1
                after[i][j] = max(best[i][cut], prefix[j] - prefix[cut])
        best = after
    return best


@lru_cache(maxsize=32)
def _even(costs: tuple[float, ...], ranks: int, rounds: int) -> list[tuple[int, int]]:
    """Ranges of ranks * rounds stages that minimise the sum over rounds of the slowest of `ranks` stages in a row."""
    n, slowest = len(costs), _slowest(costs, ranks)
    best = [(0.0, 0.0)] + [(inf, inf)] * n
    ends: list[list[int]] = []
    for _ in range(rounds):
        after, start = [(inf, inf)] * (n + 1), [0] * (n + 1)
        for j in range(1, n + 1):
            for i in range(j):
                found = best[i][0] + slowest[i][j], max(best[i][1], slowest[i][j])
                if found < after[j]:
                    after[j], start[j] = found, i
        best = after
        ends.append(start)
    ranges: list[tuple[int, int]] = []
    last = n
    for start in reversed(ends):
        first = start[last]
        ranges = [(first + a, first + b) for a, b in _balance(list(costs[first:last]), ranks)] + ranges
        last = first
    return ranges
