"""The ladder's mixers train alike under every layout that the hybrid supports: three steps in fp32."""

from __future__ import annotations

from typing import Any

import pytest

from k3train.config.compose import compose
from k3train.errors import LayoutError
from tests.parallel.compare import differences, one_process, train

Case = tuple[str, int, dict[str, Any]]
BRIEF: list[Case] = [
    ("softmax", 2, {"context": 2}), ("gated_delta", 2, {"context": 2}), ("linear", 2, {"pipeline": 2}),
    ("delta", 2, {"tensor": 2}),
]  # fmt: skip
EVERY: list[tuple[int, dict[str, Any]]] = [
    (2, {"tensor": 2}), (2, {"context": 2}), (2, {"pipeline": 2}), (2, {"data": 2}), (2, {"expert": 2}),
    (4, {"tensor": 2, "context": 2}), (4, {"context": 4}),
]  # fmt: skip
MIXERS = ("softmax", "linear", "delta", "gated_delta")
REST = [(mixer, *case) for mixer in MIXERS for case in EVERY if (mixer, *case) not in BRIEF]
CASES = [*BRIEF, *(pytest.param(*case, marks=pytest.mark.ops) for case in REST)]


@pytest.mark.parametrize(("mixer", "world", "sizes"), CASES, ids=str)
def test_a_mixer_trains_as_in_one_process(mixer: str, world: int, sizes: dict[str, Any]) -> None:
    chosen = {"model.mixer": mixer}
    assert not differences(train(world, sizes, chosen), one_process(chosen))


def test_heads_that_context_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(LayoutError, match="parallel.context=2, or model.mixer=kda"):
        compose(["model.mixer=linear", "model.kda.heads=6", "parallel.context=4", "train.seq_length=256"])
