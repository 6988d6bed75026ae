"""What a run must remember besides weights and optimizer: small, equal on every rank, saved in each checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class RunState:
    """step: optimizer steps done. consumed_samples: global sample index of the next step's first sequence."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0
    flops: float = 0.0  # model FLOPs spent so far, by the convention of k3train.planning.flops
    first_loss: float | None = None
    last_loss: float | None = None
    validation_loss: float | None = None
    run_id: str | None = None  # of W&B, one for the life of the run
    restarts: int = 0
    bad_steps: int = 0  # in a row, up to now
    bad_since: int = 0  # consumed_samples where that row began
    grad_norms: list[float] = field(default_factory=list)  # of the latest good steps, newest last
    left_out: list[list[int]] = field(default_factory=list)  # dataset samples never to be read again: [first, last + 1]
    rollbacks: list[int] = field(default_factory=list)  # the steps that the run went back to, in order

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunState:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in values.items() if k in known})
