"""The comparisons of docs/results.md: which runs, over which seeds, and which recall tasks each answers at its end."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Arm:
    """One run: `k3train train OVERRIDES run.seed=SEED`. suites: recall tasks answered after the last step."""

    group: str
    name: str
    overrides: tuple[str, ...]
    seed: int = 1
    suites: tuple[str, ...] = field(default=())

    @property
    def words(self) -> list[str]:
        """What is typed after `k3train train`, but for the folder's name."""
        return [*self.overrides, f"run.seed={self.seed}"]

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What a record of this arm is known by; the last part changes with the overrides or the suites."""
        text = " ".join([*self.words, "|", *self.suites])
        return self.group, self.name, self.seed, hashlib.sha256(text.encode()).hexdigest()[:12]
