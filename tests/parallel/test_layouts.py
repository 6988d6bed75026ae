"""Every parallel layout trains the model that one process trains: three optimizer steps in fp32, packed documents.

Compared in causal order: the expert of every token, tokens and load, loss, gradient norm, every parameter's gradient
(whole, relative L2 of 1e-5 with a floor of 1e-7 of the global norm), the balancing biases.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.compare import differences, one_process, train, worst

Case = tuple[int, dict[str, Any], dict[str, Any]]

# world, sizes, overrides. Sequence parallelism is on with tensor parallelism, and data parallelism takes what is left.
PADDED = {"transport": "padded"}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
DENSE = {"model.dense_layers": 9}
# one sequence a micro-batch, so that documents cross the borders of context-parallel ranks
ALONE = {"train.micro_batch": 1, "train.global_batch": 4}
# documents looked up on the device, as in a captured step; without a GPU the step is launched from Python
CAPTURABLE = {**ALONE, "train.cuda_graphs": "step"}
# What the plain run trains: each kind of parallelism alone, each pair that shares code, each switch once.
LAYOUTS: list[Case] = [
    (2, {"tensor": 2}, {}),
    (2, {"tensor": 2, "sequence": False}, DENSE),  # experts need sequence parallelism with tensor parallelism
    (2, {"pipeline": 2}, {}),
    (2, {"pipeline": 2, "virtual": 2}, {}),
    (2, {"pipeline": 2, "virtual": 2, **PADDED}, {}),
    (2, {"pipeline": 2, "virtual": 4}, {}),
    (2, {"pipeline": 2, "virtual": 2, "pipeline_layout": "E K|K K F K K|K|F F L"}, {}),  # borders inside blocks
    (2, {"pipeline": 2, "virtual": 3, "pipeline_layout": "even"}, {}),
    (2, {"pipeline": 2, "virtual": 2}, {"model.attention_residuals": "full"}),
    (2, {"pipeline": 2, "virtual": 2}, {"model.attention_residuals": "off"}),
    (2, {"expert": 2}, {}),
    (2, {"data": 2}, {}),
    (2, {"context": 2}, ALONE),
    (4, {"context": 2, "tensor": 2}, ALONE),
    (2, {"context": 2}, CAPTURABLE),
    (4, {"context": 2, "expert": 4}, ALONE),  # experts over data x context ranks
    (4, {"pipeline": 4, "virtual": 2}, {}),
    (4, {"tensor": 2, "expert": 2}, {}),
    (4, {"tensor": 2, "pipeline": 2, "virtual": 2}, {}),
    (4, {"pipeline": 2, "virtual": 2, "data": 2}, {}),
    (4, {"pipeline": 2, "virtual": 2, "expert": 2}, {"model.balancing": "aux_loss"}),
    # the same with reductions overlapped, and with the optimizer's state on every rank
    (2, {"data": 2, **OVERLAP}, {}),
    (4, {"tensor": 2, "expert": 4, **OVERLAP}, {}),
    (4, {"tensor": 2, "expert": 4, "distributed_optimizer": False}, {}),
]
# The rest of the matrix, which `-m ops` trains.
FURTHER: list[Case] = [
    (2, {"pipeline": 2, **PADDED}, {}),
    (2, {"pipeline": 2, "virtual": 4, **PADDED}, {}),
    (2, {"context": 2}, {}),
    (4, {"context": 4}, {"train.micro_batch": 1}),
    (4, {"context": 4}, {"train.micro_batch": 1, "model.kda.decay_bound": None}),
    (4, {"context": 2, "tensor": 2}, CAPTURABLE),
    (4, {"context": 4}, CAPTURABLE),
    (4, {"context": 4}, {**CAPTURABLE, "model.kda.decay_bound": None}),
    (2, {"context": 2}, {**CAPTURABLE, "train.recompute": "unit"}),
    (4, {"context": 2, "pipeline": 2}, {**CAPTURABLE, "train.recompute": "unit", "train.recompute_layers": 4}),
    (2, {"context": 2}, {"train.micro_batch": 1, "train.recompute": "full", "train.recompute_layers": 3}),
    (2, {"context": 2}, {"train.cuda_graphs": "step"}),
    (4, {"context": 2, "data": 2}, CAPTURABLE),
    (4, {"context": 2, "pipeline": 2}, CAPTURABLE),
    # room for every row: a step that is done again would show its selections twice
    (4, {"context": 2, "expert": 2, "expert_exchange": "slots", "expert_capacity": 2.0}, CAPTURABLE),
    (4, {"context": 2, "pipeline": 2, "transport": "padded"}, {"train.micro_batch": 1}),
    (4, {"context": 2, "data": 2}, {"train.micro_batch": 1}),
    (4, {"context": 2, "expert": 2}, {"train.micro_batch": 1}),
    (4, {"pipeline": 4}, {}),
    (4, {"pipeline": 4, **PADDED}, {}),
    (4, {"pipeline": 4, "virtual": 2, **PADDED}, {}),
    (4, {"expert": 4}, {}),
    (4, {"data": 4}, {}),
    (4, {"tensor": 2, "pipeline": 2}, {}),
    (4, {"tensor": 2, "data": 2}, {}),
    (4, {"pipeline": 2, "expert": 2}, {}),
    (4, {"pipeline": 2, "data": 2}, {}),
    (4, {"expert": 2, "data": 4}, {}),
    (4, {"context": 2, "pipeline": 2}, {}),
    (4, {"tensor": 2, "context": 2}, {"model.balancing": "aux_loss"}),
    (4, {"tensor": 2, "data": 2}, {"model.balancing": "sign"}),
    (4, {"pipeline": 2, "virtual": 2, "expert": 2, **OVERLAP}, {}),
    (2, {"data": 2, "distributed_optimizer": False}, {}),
    (4, {"pipeline": 2, "expert": 2, "distributed_optimizer": False}, {}),
    (2, {"tensor": 2, "distributed_optimizer": False, "overlap_grad_reduce": True}, {}),
]


def name(case: Case) -> str:
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


CASES = [*LAYOUTS, *(pytest.param(case, marks=pytest.mark.ops) for case in FURTHER)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: name(case))
def test_layout_trains_what_one_process_trains(case: Case) -> None:
    world, sizes, overrides = case
    seen = train(world, sizes, overrides)
    same = ("train.micro_batch", "train.cuda_graphs", "train.recompute")  # whatever they say, it is the same training
    want = one_process({k: v for k, v in overrides.items() if not k.startswith(same)})
    print(f"largest relative distance of a gradient: {worst(seen, want):.1e}")
    assert not differences(seen, want)
