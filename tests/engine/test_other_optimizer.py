"""A checkpoint whose optimizer kept its state otherwise is refused in a sentence that says what to type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k3train.errors import CheckpointError
from tests.parallel.tiny import SEED, batches, make_engine


def test_state_of_another_kind_of_optimizer_is_refused_by_name(one_rank: Any, tmp_path: Path) -> None:
    engine = make_engine({})
    engine.step(
        batches(engine.config, engine.layout, 0, SEED), 1e-3, engine.micro_batches(engine.config.train.global_batch)
    )
    engine.save(tmp_path, {"step": 1})
    other = make_engine({"distributed_optimizer": False})
    with pytest.raises(CheckpointError, match="parallel.distributed_optimizer"):
        other.load(tmp_path)
    assert other.load(tmp_path, optimizer=False) == {"step": 1}
