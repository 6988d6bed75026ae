"""Puts together what the ranks saw of a step: whole gradients, experts by global token, biases; replicas must agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass
class Piece:
    """values are elements start, start + 1, ... of the flattened local shard of shape `local`, which is number `place`
    along `axis` of the whole parameter (replicated where axis is None)."""

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    axis: int | None
    place: int
    start: int
    values: np.ndarray


@dataclass
class RankSeen:
    """One optimizer step as one rank saw it."""

    loss: float
    tokens: int
    grad_norm: float
    load: np.ndarray | None
    gradients: list[Piece]
    selections: dict[int, list[tuple[int, np.ndarray]]]
    gap: float
    biases: dict[int, np.ndarray]
    extra: dict[str, float] = field(default_factory=dict)
    parameters: list[Piece] = field(default_factory=list)  # as the step left them


@dataclass
class Seen:
    """One optimizer step of the whole layout."""

    loss: float
    tokens: int
    grad_norm: float
    load: torch.Tensor | None
    gradients: dict[str, torch.Tensor]
    selections: dict[int, torch.Tensor]
    gap: float
    biases: dict[int, torch.Tensor]
    extra: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # as the step left them


def assemble(ranks: list[list[RankSeen]]) -> list[Seen]:
    """Steps as the layout saw them, from each rank's list of steps."""
    return [_step(list(step)) for step in zip(*ranks, strict=True)]


def _step(ranks: list[RankSeen]) -> Seen:
    first = ranks[0]
    for other in ranks:
        assert (other.loss, other.tokens, other.grad_norm) == (first.loss, first.tokens, first.grad_norm), (
            "ranks disagree"
        )
        assert other.extra == first.extra, "ranks disagree on a metric"
        assert other.load is None or np.array_equal(other.load, first.load), "ranks disagree on the load"
    table: dict[int, dict[int, np.ndarray]] = {}
    biases: dict[int, np.ndarray] = {}
    for rank in ranks:
        for layer, parts in rank.selections.items():
            table.setdefault(layer, {}).update(dict(parts))
        for layer, bias in rank.biases.items():
            assert np.array_equal(biases.setdefault(layer, bias), bias), f"ranks disagree on the bias of layer {layer}"
    selections = {n: torch.from_numpy(np.concatenate([p[s] for s in sorted(p)])) for n, p in sorted(table.items())}
    load = None if first.load is None else torch.from_numpy(first.load)
    gradients = whole_tensors([p for rank in ranks for p in rank.gradients])
    return Seen(
        first.loss, first.tokens, first.grad_norm, load, gradients, selections, min(r.gap for r in ranks),
        {n: torch.from_numpy(b) for n, b in biases.items()}, first.extra,
        whole_tensors([p for rank in ranks for p in rank.parameters]),
    )  # fmt: skip


def whole_tensors(pieces: list[Piece]) -> dict[str, torch.Tensor]:
    """Whole gradients or parameters by name; a rank whose copy differs from another's would train another model."""
    shards: dict[str, dict[int, np.ndarray]] = {}
    about: dict[str, Piece] = {}
    for p in pieces:
        about[p.name] = p
        shard = shards.setdefault(p.name, {}).setdefault(p.place, np.full(p.local, np.nan, np.float32))
        region = shard.reshape(-1)[p.start : p.start + p.values.size]
        _same(region, p.values, f"replicas of {p.name} differ")
        region[:] = p.values
    whole: dict[str, Any] = {}
    for name, parts in shards.items():
        axis = about[name].axis
        if axis is None:
            for other in parts.values():
                _same(parts[min(parts)], other, f"tensor ranks disagree on {name}")
            full = parts[min(parts)]
        else:
            full = np.concatenate([parts[i] for i in sorted(parts)], axis=axis)
        assert full.shape == about[name].shape and not np.isnan(full).any(), f"{name} is not whole"
        whole[name] = torch.from_numpy(full)
    return whole


def _same(a: np.ndarray, b: np.ndarray, message: str) -> None:
    known = ~(np.isnan(a) | np.isnan(b))
    scale = max(float(np.abs(b[known]).max(initial=0.0)), 1e-12)
    assert np.abs(a[known] - b[known]).max(initial=0.0) <= 1e-5 * scale, message
