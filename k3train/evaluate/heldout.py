"""Loss of every sequence, and what a mean over sequences is worth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from k3data.batch import Batch
from k3train.model.context import PackedStream
from k3train.model.k3 import K3Model

Z = 1.96  # of a 95 % interval


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % confidence interval over independent units, and their number."""

    mean: float
    low: float
    high: float
    units: int

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


def estimate(sums: list[float], weights: list[float]) -> Estimate:
    """Ratio sum(sums) / sum(weights) over units (sequences), its error by linearisation of the ratio (normal)."""
    total = sum(weights)
    if total <= 0:
        raise ValueError("no token was counted: every loss mask was zero")
    mean, n = sum(sums) / total, len(sums)
    if n < 2:
        return Estimate(mean, float("-inf"), float("inf"), n)
    residual = [s - mean * w for s, w in zip(sums, weights)]
    error = math.sqrt(sum(r * r for r in residual) * n / (n - 1)) / total
    return Estimate(mean, mean - Z * error, mean + Z * error, n)


def proportion(right: list[float], asked: list[float]) -> Estimate:
    """Share of answers that are right, with the Wilson interval of as many independent answers as the spread between
    sequences is worth; without any spread (all right, or none) every sequence counts as one answer."""
    plain = estimate(right, asked)
    p, n = plain.mean, float(plain.units)
    error = (plain.high - plain.low) / (2 * Z)
    if 0 < p < 1 and 0 < error < math.inf:
        n = min(p * (1 - p) / error**2, sum(asked))
    centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half), plain.units)


@torch.no_grad()
def logits_of(model: K3Model, batch: Batch, seq_length: int) -> torch.Tensor:
    """fp32 logits [T, V] of a packed micro-batch."""
    total = batch.tokens.numel()
    return model(batch.tokens, None, PackedStream(batch.cu_seqlens, total, sequence_length=seq_length)).float()


@torch.no_grad()
def sequence_losses(model: K3Model, batches: Iterable[Batch], seq_length: int) -> tuple[list[float], list[float]]:
    """Loss sum (nats) and counted tokens of every sequence; sequences without a counted token are left out."""
    model.eval()
    sums: list[float] = []
    counts: list[float] = []
    for batch in batches:
        losses = torch.nn.functional.cross_entropy(logits_of(model, batch, seq_length), batch.labels, reduction="none")
        per = (losses * batch.loss_mask).view(-1, seq_length).sum(1).tolist()
        tokens = batch.loss_mask.view(-1, seq_length).sum(1).tolist()
        for s, n in zip(per, tokens):
            if n > 0:
                sums.append(s)
                counts.append(n)
    return sums, counts


@torch.no_grad()
def recall(model: K3Model, batches: Iterator[Batch], seq_length: int) -> Estimate:
    """Share of answers that the most likely token gets right, over sequences."""
    model.eval()
    right: list[float] = []
    asked: list[float] = []
    for batch in batches:
        hit = (logits_of(model, batch, seq_length).argmax(-1) == batch.labels).float() * batch.loss_mask
        right += hit.view(-1, seq_length).sum(1).tolist()
        asked += batch.loss_mask.view(-1, seq_length).sum(1).tolist()
    return proportion(right, asked)
