"""What a run must remember besides weights and optimizer: small, equal on every rank, saved in each checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunState:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in values.items() if k in known})
