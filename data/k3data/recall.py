"""Synthetic recall tasks: what a fixed-size memory keeps, replaces and lets go.

A sample is a row of independent episodes, each a document of its own (so the model's memory starts empty), filled up
with end tokens. An episode writes pairs of a key and a value and then asks for keys; only the answers are learnt:

    k v k v k v ?  k v  k v  <end>
                   ^ the label here is the value, and the only ones with a loss are these

  multi_query  `pairs` keys written once, all asked for in another order (Arora et al. 2023, "Zoology")
  overwrite    each key written `rewrites` times, interleaved; the last value counts
  needle       `pairs` keys, then `distance` tokens of noise, then the questions
  forgetting   `stale` pairs that are never asked for, a forget token, then `pairs` useful ones

A task is named in a configuration as `recall:overwrite,pairs=16,rewrites=4`. Samples are a function of
(seed, stream, index); streams keep training and held-out episodes apart.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass

import numpy as np
import torch

from k3data.batch import Batch, Sample
from k3train.errors import DataError

TASKS = ("multi_query", "overwrite", "needle", "forgetting")

# Tokens 0 to 66; keys and values share the rest of the vocabulary equally.
END, ASK, FORGET = 0, 1, 2
NOISE = range(3, 67)

TRAIN, HELD_OUT = 0, 1


@dataclass(frozen=True)
class RecallTask:
    """What an episode holds. `easiest` < 1 draws each episode's counts between that share of them and the whole."""

    kind: str
    pairs: int = 16  # keys that are asked for
    rewrites: int = 4  # overwrite: times each key is written
    distance: int = 64  # needle: noise tokens between the pairs and the questions
    stale: int = 32  # forgetting: pairs that are never asked for
    easiest: float = 1.0

    def __post_init__(self) -> None:
        """Raises DataError for an unknown kind or a count that makes no task."""
        if self.kind not in TASKS:
            close = difflib.get_close_matches(self.kind, TASKS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise DataError(f"recall task {self.kind!r} is none of {', '.join(TASKS)}{hint}")
        for name in ("pairs", "rewrites"):
            if getattr(self, name) < 1:
                raise DataError(f"recall:{self.kind} needs {name} of at least 1, got {getattr(self, name)}")
        for name in ("distance", "stale"):
            if getattr(self, name) < 0:
                raise DataError(f"recall:{self.kind} needs {name} of at least 0, got {getattr(self, name)}")
        if not 0 < self.easiest <= 1:
            raise DataError(f"recall:{self.kind} needs easiest in (0, 1], got {self.easiest}")

    @property
    def keys(self) -> int:
        """Distinct keys of an episode."""
        return self.pairs + (self.stale if self.kind == "forgetting" else 0)

    @property
    def length(self) -> int:
        """Tokens of the longest episode, with its end."""
        extra = {
            "multi_query": 0,
            "overwrite": 2 * self.pairs * (self.rewrites - 1),
            "needle": self.distance,
            "forgetting": 2 * self.stale + 1,
        }[self.kind]
        return 4 * self.pairs + extra + 2


def parse_task(text: str) -> RecallTask:
    """Read `recall:KIND,name=number,...`. Raises DataError naming what it does not know."""
    kind, *options = text.removeprefix("recall:").split(",")
    known = {field.name: field.type for field in dataclasses.fields(RecallTask) if field.name != "kind"}
    values: dict[str, float] = {}
    for option in options:
        name, separator, value = option.partition("=")
        if name not in known or not separator:
            raise DataError(f"{text!r}: {option!r} is not NAME=NUMBER with NAME one of {', '.join(known)}")
        try:
            values[name] = float(value) if known[name] == "float" else int(value)
        except ValueError:
            raise DataError(f"{text!r}: {name} takes a number ({known[name]}), not {value!r}") from None
    return RecallTask(kind, **values)  # type: ignore[arg-type]


class RecallDataset:
    """A task as an endless (or `samples` long) map from index to sample, like `TextDataset`."""

    eod = END

    def __init__(
        self,
        task: RecallTask,
        seq_length: int,
        *,
        vocab_size: int = 512,
        seed: int = 0,
        stream: int = TRAIN,
        samples: int | None = None,
    ) -> None:
        """Raises DataError when an episode does not fit the sequence or its keys the vocabulary."""
        if task.length > seq_length:
            raise DataError(
                f"an episode of recall:{task.kind} takes {task.length} tokens, more than train.seq_length="
                f"{seq_length}; ask for fewer pairs or a longer sequence"
            )
        self.keys_first = NOISE.stop
        self.key_count = (vocab_size - NOISE.stop) // 2
        self.values_first = self.keys_first + self.key_count
        if self.key_count < max(task.keys, 2):
            raise DataError(
                f"vocab_size={vocab_size} leaves {max(self.key_count, 0)} keys, fewer than the {task.keys} of "
                f"recall:{task.kind}; give {NOISE.stop + 2 * max(task.keys, 2)} or more"
            )
        self.task, self.seq_length, self.vocab_size = task, seq_length, vocab_size
        self.seed, self.stream, self.samples = seed, stream, samples

    @property
    def chance_nats(self) -> float:
        """Cross-entropy of guessing uniformly among the values."""
        return float(np.log(self.key_count))

    def sample(self, index: int) -> Sample:
        """As many whole episodes as fit, then end tokens. Raises IndexError outside [0, samples)."""
        if index < 0 or (self.samples is not None and index >= self.samples):
            raise IndexError(f"sample {index} of {self.samples}")
        draw = np.random.default_rng([self.seed, self.stream, TASKS.index(self.task.kind), index])
        text = np.full(self.seq_length + 1, END, np.int64)
        answers = np.zeros(self.seq_length + 1, bool)
        starts = []
        at = 0
        while at + self.task.length <= self.seq_length:
            episode, asked = self._episode(draw)
            text[at : at + len(episode)] = episode
            answers[at + len(episode) - 2 * asked - 1 + np.arange(asked) * 2] = True
            at += len(episode)
            starts.append(at)
        starts = [start for start in starts if start < self.seq_length]
        return Sample(text[:-1], text[1:], answers[:-1].astype(np.float32), np.array(starts, np.int64))

    def _size(self, draw: np.random.Generator, most: int) -> int:
        if self.task.easiest == 1 or most < 2:
            return most
        return int(draw.integers(max(int(np.ceil(most * self.task.easiest)), 1), most + 1))

    def _episode(self, draw: np.random.Generator) -> tuple[np.ndarray, int]:
        """One episode and the number of its questions; its last tokens are the questions with answers, and the end."""
        task = self.task
        pairs = self._size(draw, task.pairs)
        stale = self._size(draw, task.stale) if task.kind == "forgetting" else 0
        keys = draw.permutation(self.key_count)[: pairs + stale] + self.keys_first
        useful = keys[:pairs]
        before = np.empty(0, np.int64)
        after = np.empty(0, np.int64)
        writes = np.arange(pairs)
        if task.kind == "overwrite":
            writes = draw.permutation(np.repeat(writes, self._size(draw, task.rewrites)))
        elif task.kind == "needle":
            after = draw.integers(NOISE.start, NOISE.stop, self._size(draw, task.distance))
        elif task.kind == "forgetting":
            before = np.append(_interleave(keys[pairs:], self._values(draw, stale)), FORGET)
        written = self._values(draw, len(writes))
        last = np.empty(pairs, np.int64)
        last[writes] = written  # of equal keys the last assignment stays
        order = draw.permutation(pairs)
        episode = np.concatenate(
            [before, _interleave(useful[writes], written), after, [ASK], _interleave(useful[order], last[order]), [END]]
        )
        return episode, pairs

    def _values(self, draw: np.random.Generator, count: int) -> np.ndarray:
        return draw.integers(self.values_first, self.values_first + self.key_count, count)


def _interleave(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.stack([keys, values], axis=1).reshape(-1)


def recall_accuracy(predictions: torch.Tensor, batch: Batch) -> tuple[int, int]:
    """(right, asked) over a batch; `predictions` int [T] are the most likely next tokens."""
    asked = batch.loss_mask > 0
    return int((predictions[asked] == batch.labels[asked]).sum()), int(asked.sum())
