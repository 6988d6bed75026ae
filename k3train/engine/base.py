"""The verbs an engine answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Protocol

import torch

Batch = dict[str, torch.Tensor]
"""tokens, labels int64 [T], loss_mask fp32 [T], cu_seqlens int32 [N+1]: one micro-batch as one packed stream.

valid bool [T], where there is padding: False for tokens that expert balancing must not count.
"""


@dataclass
class StepResult:
    """loss: mean over the global batch's counted tokens. load: int64 [MoE layers, E] tokens routed this step."""

    loss: float
    tokens: int
    grad_norm: float = float("nan")
    skipped: bool = False
    load: torch.Tensor | None = None
    bias_range: tuple[float, float] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """Build, step, evaluate, save, poll_save, load, full_parameters, agree."""

    def step(
        self, batches: Iterator[Batch], lr: float, micro_batches: int, *, max_grad_norm: float = inf
    ) -> StepResult: ...

    def micro_batches(self, samples: int) -> int: ...

    def set_probe(self, probe: Callable[[str, torch.Tensor], None] | None) -> None: ...

    def remember_weights(self) -> None: ...

    def weight_change(self) -> tuple[float, float]: ...

    def evaluate(self, batches: Iterator[Batch], micro_batches: int) -> tuple[float, int]: ...

    def save(
        self, folder: Path, state: dict[str, Any], *, seal: Callable[[Any], None] | None = None, wait: bool = True
    ) -> None: ...

    def poll_save(self, *, wait: bool = False) -> Path | None: ...

    def load(self, folder: Path, *, optimizer: bool = True) -> dict[str, Any]: ...

    def full_parameters(self) -> dict[str, torch.Tensor]: ...

    def agree(self, flag: int) -> int: ...
