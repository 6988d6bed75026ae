"""What ranks run when pipeline transfers are looked at."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

from k3train.engine import gradients
from k3train.engine.megatron import MegatronEngine
from k3train.errors import LayoutError
from k3train.parallel.transport import Communicator, StageLink
from tests.parallel.tiny import SEED, batches, make_engine


def _step(engine: MegatronEngine) -> int:
    micro = engine.micro_batches(engine.config.train.global_batch)
    engine.step(batches(engine.config, engine.layout, 0, SEED), 1e-3, micro)
    return micro


def _queued(engine: MegatronEngine) -> int:
    return sum(len(m.link.kept) for m in engine.models if m.link is not None)


def one_step(sizes: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(sizes)
    micro = _step(engine)
    assert engine.transport is not None
    return {"sent": engine.transport.sent, "finished": engine.transport.finished(), "micro_batches": micro}


def _watch_sends(
    engine: MegatronEngine, pick: Callable[[StageLink, Any], list[Any]], alive: Callable[[Any], bool]
) -> dict[str, int]:
    """One step: of the tensors that `pick` takes at each send, the most that are alive at any send, and after the step."""
    made: list[weakref.ref[Any]] = []
    most = 0
    real = StageLink.send

    def count() -> int:
        tensors = [r() for r in made]
        return sum(t is not None and alive(t) for t in tensors)

    def send(self: StageLink, sources: list[Any]) -> Any:
        nonlocal most
        packed = real(self, sources)
        made.extend(weakref.ref(t) for t in pick(self, packed))
        most = max(most, count())
        return packed

    StageLink.send = send
    try:
        _step(engine)
    finally:
        StageLink.send = real
    return {"made": len(made), "most": most, "left": count()}


def kept_leaves(sizes: dict[str, Any], overrides: dict[str, Any]) -> dict[str, int]:
    engine = make_engine(sizes, overrides)
    seen = _watch_sends(engine, lambda link, _: [link.kept[-1][0]] if link.kept else [], lambda t: t.numel() > 0)
    return {**seen, "queued": _queued(engine)}


def sent_tensors(sizes: dict[str, Any]) -> dict[str, int]:
    """Packed tensors that still hold memory: the most at any send, and what is left after the step."""
    return _watch_sends(make_engine(sizes), lambda _, packed: [packed], lambda t: t.untyped_storage().size() > 0)


def evaluate(sizes: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(sizes)
    micro = engine.micro_batches(engine.config.train.global_batch)
    loss, tokens = engine.evaluate(batches(engine.config, engine.layout, 0, SEED), micro)
    counted = sum(r.load is not None or r.counts is not None for r in gradients.routers(engine.models))
    return {"loss": loss, "tokens": tokens, "queued": _queued(engine), "counted": counted}


def batched(sizes: dict[str, Any]) -> str:
    engine = make_engine(sizes)
    assert engine.transport is not None
    config = copy.copy(engine.ctx.megatron)
    config.overlap_p2p_comm, config.batch_p2p_comm = False, True
    try:
        Communicator(engine.layout.pp, config, engine.transport.table, 1)
    except LayoutError as error:
        return str(error)
    return "accepted"
