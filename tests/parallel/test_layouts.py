"""Every parallel layout trains the model that one process trains: three optimizer steps in fp32, packed documents.

Compared in causal order: the expert of every token, tokens and load, loss, gradient norm, every parameter's gradient
(whole, relative L2 of 1e-5 with a floor of 1e-7 of the global norm), the balancing biases.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.compare import differences, one_process, worst
from tests.parallel.pool import pool

LAYOUTS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    # world, sizes, overrides; sequence parallelism is on with tensor parallelism, data parallelism takes what is left
    (2, {"tensor": 2}, {}),
    (2, {"pipeline": 2, "transport": "padded"}, {}),
    (2, {"expert": 2}, {}),
    (2, {"data": 2}, {}),
]


def name(case: tuple[int, dict[str, Any], dict[str, Any]]) -> str:
    world, sizes, overrides = case
    short = {"tensor": "TP", "pipeline": "PP", "virtual": "VPP", "context": "CP", "expert": "EP", "data": "DP"}
    words = [f"{short[k]}{v}" if k in short else f"{k}={v}" for k, v in sizes.items()]
    words += [f"{k.rsplit('.', 1)[1]}={v}" for k, v in overrides.items()]
    return f"{world} ranks " + " ".join(words)


def test_no_selection_hangs_on_rounding() -> None:
    """The smallest distance between a chosen and a refused expert, over every token of the reference's steps."""
    gaps = [step.gap for step in one_process()]
    print("smallest selection gap of each step:", [f"{g:.1e}" for g in gaps])
    assert min(gaps) >= 1e-5


@pytest.mark.parametrize("case", LAYOUTS, ids=name)
def test_layout_trains_what_one_process_trains(case: tuple[int, dict[str, Any], dict[str, Any]]) -> None:
    world, sizes, overrides = case
    seen = pool(world).run("tests.parallel.cases:train", sizes=sizes, overrides=overrides)[0]
    want = one_process({k: v for k, v in overrides.items() if k.startswith("model.")})
    print(f"largest relative distance of a gradient: {worst(seen, want):.1e}")
    assert not differences(seen, want)
