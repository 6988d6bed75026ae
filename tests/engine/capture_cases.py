"""What ranks run in tests of captured steps on machines without a GPU."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from k3train.engine.base import Batch
from k3train.engine.graphs import Buffers, Run, StepGraphs, whole_schedule
from k3train.engine.megatron import MegatronEngine
from k3train.model.backend import local
from tests.engine.host_reads import host_reads
from tests.parallel.tiny import SEED, batches, make_engine


class Rehearsal(StepGraphs):
    """Graphs that are not captured: a replay runs the same Python again, on the fixed buffers alone."""

    def __init__(self, engine: MegatronEngine) -> None:
        self.begin(engine._schedule if engine.whole else engine._one_micro_batch)

    def begin(self, run: Run) -> None:
        self.run = run
        self.stream = SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
        self.graphs, self.warm, self.off = {}, set(), False
        self.replays = 0

    def _eager(self, batches: list[Batch]) -> None:
        self.run(batches)

    def _record(self, static: Buffers) -> Any:
        def replay() -> None:
            self.replays += 1
            self.run(static.batches)

        return SimpleNamespace(replay=replay)


def steps(sizes: dict[str, Any], overrides: dict[str, Any], number: int, *, captured: bool) -> dict[str, Any]:
    engine = make_engine(sizes, overrides)
    assert engine.whole == whole_schedule(engine.config.parallel)
    if captured:
        engine.graphs = Rehearsal(engine)
    micro = engine.micro_batches(engine.config.train.global_batch)
    results, own = [], []
    for i in range(number):
        taken = list(batches(engine.config, engine.layout, i, SEED))
        # the bounds of the graph that the step would be; a micro-batch by itself has its own
        own.append(engine.spans_of(taken))
        with engine.bounded(own[-1] if engine.whole else None):
            results.append(engine.step(iter(taken), 1e-3, micro))
    return {
        "results": [(r.loss, r.tokens, r.grad_norm, None if r.load is None else r.load.tolist()) for r in results],
        "own": own,
        "graphs": len(engine.graphs.graphs) if engine.graphs is not None else 0,
        "replays": engine.graphs.replays if isinstance(engine.graphs, Rehearsal) else 0,
    }


def rehearse(sizes: dict[str, Any], overrides: dict[str, Any], number: int = 3) -> dict[str, Any]:
    """The same steps as they are launched from Python, and through the path of captured graphs."""
    plain = steps(sizes, overrides, number, captured=False)
    return {"plain": plain["results"], **steps(sizes, overrides, number, captured=True)}


def mask_of_a_suffix(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def audited(sizes: dict[str, Any], overrides: dict[str, Any]) -> Counter[str]:
    """Where the forwards, backwards and reductions of one step would make the host wait for a GPU."""
    engine = make_engine(sizes, overrides)
    local.causal_lower_right = mask_of_a_suffix  # torch's own is a kind of tensor that the audit cannot look into
    micro = engine.micro_batches(engine.config.train.global_batch)
    source = list(batches(engine.config, engine.layout, 0, SEED))
    with host_reads() as seen:
        engine._run_schedule(iter(source), micro, forward_only=False)
    return seen
