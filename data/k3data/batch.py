"""The micro-batch that data hands to a model: b sequences of s tokens as one flat stream of T = b*s tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Sample:
    """One sequence of s tokens, as numpy arrays."""

    tokens: np.ndarray  # int64 [s]
    labels: np.ndarray  # int64 [s], the token that follows
    loss_mask: np.ndarray  # float32 [s], 0 where the label is not to be learnt
    starts: np.ndarray  # int64 [n], offsets at which a document begins, without 0


@dataclass(frozen=True)
class Batch:
    """A flat stream; recurrence, convolution and attention start anew at every entry of `cu_seqlens`."""

    tokens: torch.Tensor  # int64 [T]
    labels: torch.Tensor  # int64 [T]
    loss_mask: torch.Tensor  # float32 [T]
    cu_seqlens: torch.Tensor  # int32 [N+1], from 0 to T
    max_seqlen: int  # longest piece, known without asking the device

    def to(self, device: torch.device | str, pin: bool = False) -> Batch:
        """The batch on a device; with `pin` the copy goes through page-locked memory and does not wait."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if pin else tensor.to(device)

        return Batch(move(self.tokens), move(self.labels), move(self.loss_mask), move(self.cu_seqlens), self.max_seqlen)


def pack(samples: list[Sample]) -> Batch:
    """Lay samples end to end; each begins a new piece, and so does each document inside it."""
    bounds: list[np.ndarray] = []
    offset = 0
    for sample in samples:
        bounds += [np.array([offset], np.int64), sample.starts + offset]
        offset += len(sample.tokens)
    cu_seqlens = np.concatenate([*bounds, np.array([offset], np.int64)])
    return Batch(
        torch.from_numpy(np.concatenate([sample.tokens for sample in samples])),
        torch.from_numpy(np.concatenate([sample.labels for sample in samples])),
        torch.from_numpy(np.concatenate([sample.loss_mask for sample in samples])),
        torch.from_numpy(cu_seqlens.astype(np.int32)),
        int(np.diff(cu_seqlens).max()),
    )


def sample_of(text: np.ndarray, eod: int) -> Sample:
    """The sample of s+1 consecutive tokens: a document ends with `eod`, and nothing is learnt across its end."""
    tokens, labels = text[:-1].astype(np.int64), text[1:].astype(np.int64)
    ends = np.flatnonzero(tokens == eod)
    mask = np.ones(len(tokens), np.float32)
    mask[ends] = 0.0
    return Sample(tokens, labels, mask, ends[ends < len(tokens) - 1] + 1)
