"""What the gate does to gradients: those of a sum over tokens become those of the mean, clipped, in one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import clip_grads

from k3train.engine.base import Batch
from k3train.engine.gradients import routers
from k3train.engine.megatron import MegatronEngine
from tests.parallel.tiny import SEED, batches, make_engine


def mean_gradients(engine: MegatronEngine, taken: list[Batch]) -> list[torch.Tensor]:
    """By autograd, of the mean loss over all micro-batches, for every parameter in order."""
    parameters = list(engine.models[0].parameters())
    total = [torch.zeros_like(p) for p in parameters]
    tokens = sum(float(batch["loss_mask"].sum()) for batch in taken)
    for batch in taken:
        losses, loss_func = engine._forward(iter([batch]), engine.models[0])
        found = torch.autograd.grad(loss_func(losses)[0], parameters, allow_unused=True)
        for into, grad in zip(total, found):
            if grad is not None:
                into += grad / tokens
    for router in routers([engine.models[0]]):
        router.forget()
    return total


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("clip", [0.0, 1e9, 0.1], ids=["no clipping", "a norm below it", "a norm above it"])
def test_one_pass_divides_by_the_tokens_and_clips(
    one_rank: Any, monkeypatch: pytest.MonkeyPatch, clip: float, optimizer: str
) -> None:
    engine = make_engine({}, {"optim.clip_grad": clip, "optim.name": optimizer})
    taken = list(batches(engine.config, engine.layout, 0, SEED))
    want = mean_gradients(engine, taken)
    norm = float(torch.stack([g.norm() for g in want]).norm())
    passes: list[int] = []
    scale = clip_grads.multi_tensor_scale_impl

    def watched(chunk: int, flag: Any, lists: list[list[torch.Tensor]], factor: float) -> Any:
        passes.append(sum(t.numel() for t in lists[0]))
        return scale(chunk, flag, lists, factor)

    def never(*_: Any) -> None:
        raise AssertionError("a pass over all gradients")

    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", watched)
    monkeypatch.setattr(DistributedDataParallel, "scale_gradients", never)
    result = engine.step(iter(taken), 0.0, len(taken))
    assert passes == [sum(g.numel() for g in want)]
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    assert (norm > clip > 0) == (clip == 0.1)
    share = min(1.0, clip / norm) if clip else 1.0
    for p, grad in zip(engine.models[0].parameters(), want):
        torch.testing.assert_close(p.main_grad, grad * share, rtol=2e-3, atol=1e-5 * share * norm)


@pytest.mark.parametrize("limit", [0.0, float("nan")], ids=["too large a norm", "a limit that is no number"])
def test_a_refused_step_scales_nothing(one_rank: Any, monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
    engine = make_engine({})
    taken = list(batches(engine.config, engine.layout, 0, SEED))
    before = [p.detach().clone() for p in engine.models[0].parameters()]
    monkeypatch.setattr(engine.gate, "_scale", lambda: pytest.fail("gradients that are not applied need no pass"))
    result = engine.step(iter(taken), 1e-3, len(taken), max_grad_norm=limit)
    assert result.skipped
    assert result.grad_norm > 0
    assert all(torch.equal(a, b) for a, b in zip(before, engine.models[0].parameters()))


@pytest.mark.parametrize("captured", [False, True], ids=["launched from Python", "through captured micro-batches"])
def test_a_step_without_a_counted_token_changes_nothing_but_ends(one_rank: Any, captured: bool) -> None:
    from tests.engine.capture_cases import Rehearsal

    engine = make_engine({}, {"optim.weight_decay": 0.0})
    if captured:
        engine.graphs = Rehearsal(engine)
    taken = list(batches(engine.config, engine.layout, 0, SEED))
    for batch in taken:
        batch["loss_mask"].zero_()
    before = [p.detach().clone() for p in engine.models[0].parameters()]
    result = engine.step(iter(taken), 1e-3, len(taken))
    assert (result.tokens, result.grad_norm, result.skipped) == (0, 0.0, False)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.models[0].parameters()))
