"""QK-Clip: the same inputs have logits of at most tau afterwards, whatever holds the weights, and only after a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from k3train.engine.megatron import MegatronEngine
from k3train.engine.plain_state import masters
from k3train.train.qk_clip import attentions, stepped_parameters
from tests.engine.resuming import straight_and_resumed
from tests.parallel.tiny import SEED, batches, make_engine

TAU = 0.45
KINDS = {
    "adamw, state shared out, fp32": {},
    "adamw, state shared out, bf16": {"train.precision": "bf16"},
    "adamw, whole state, bf16": {"train.precision": "bf16", "parallel.distributed_optimizer": False},
    "adamw, whole state, fp32": {"parallel.distributed_optimizer": False},
    "muon, bf16": {"train.precision": "bf16", "optim.name": "muon"},
    "muon, fp32": {"optim.name": "muon"},
}


def step(engine: MegatronEngine, number: int = 0, lr: float = 0.0, **options: Any) -> Any:
    micro = engine.micro_batches(engine.config.train.global_batch)
    return engine.step(batches(engine.config, engine.layout, number, SEED), lr, micro, **options)


def weights(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for m in engine.models for n, p in m.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_batch_then_has_a_largest_logit_of_tau(one_rank: Any, kind: str) -> None:
    engine = make_engine({}, {"optim.qk_clip": TAU, "train.global_batch": 2, "model.balancing": "none", **KINDS[kind]})
    bf16 = engine.ctx.dtype == torch.bfloat16
    before = weights(engine)
    first = step(engine)  # with a rate of zero nothing but the clip moves the weights
    moved = {n for n, w in weights(engine).items() if not torch.equal(w, before[n])}
    assert first.extra["train/qk_max_logit"] > 1.3 * TAU and first.extra["train/qk_clipped_heads"] >= 4
    assert moved and all(n.endswith(("q_b_proj.weight", "kv_b_proj.weight")) for n in moved)
    # later layers see other inputs now: the first one's alone are the same
    layer = attentions(engine.models)[0]
    engine.qk_clip = None
    step(engine)
    seen = layer.max_logit
    assert seen is not None and float(seen.max()) == pytest.approx(TAU, rel=1e-2 if bf16 else 1e-5)


@pytest.mark.parametrize("kind", [k for k in KINDS if "bf16" in k])
def test_weights_are_the_rounded_masters(one_rank: Any, kind: str) -> None:
    engine = make_engine({}, {"optim.qk_clip": TAU, "train.global_batch": 2, **KINDS[kind]})
    clipped = step(engine, lr=1e-3).extra["train/qk_clipped_heads"]
    checked = 0
    for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        for model, stepped, start in stepped_parameters(part):
            assert torch.equal(model.view(-1)[start : start + stepped.numel()], stepped.view(-1).to(model.dtype))
            checked += stepped is not model
    assert clipped and checked > 50
    assert engine.shards_state or masters(engine.optimizer)


def test_rows_are_scaled_by_head_and_values_are_left_alone(one_rank: Any) -> None:
    engine = make_engine({}, {"optim.qk_clip": TAU, "train.global_batch": 2})
    before = weights(engine)
    layer = attentions(engine.models)[0]
    tops: list[torch.Tensor] = []
    measure = engine.qk_clip.measure  # type: ignore[union-attr]

    def look() -> None:
        tops.append(layer.max_logit.clone())  # type: ignore[union-attr]
        measure()

    engine.qk_clip.measure = look  # type: ignore[union-attr, method-assign]
    step(engine)
    gamma = (TAU / tops[0]).clamp(max=1.0)
    assert int((gamma < 1).sum()) > 0
    mla, name = engine.config.model.mla, f"layers.{layer.layer}.attention"
    q, kv = (weights(engine)[f"{name}.{w}.weight"] / before[f"{name}.{w}.weight"] for w in ("q_b_proj", "kv_b_proj"))
    q, kv = q.view(mla.heads, mla.nope_dim + mla.shared_dim, -1), kv.view(mla.heads, mla.nope_dim + mla.v_dim, -1)
    for h in range(mla.heads):
        for block, factor in (
            (q[h, : mla.nope_dim], gamma[h] ** 0.5), (q[h, mla.nope_dim :], gamma[h]),
            (kv[h, : mla.nope_dim], gamma[h] ** 0.5), (kv[h, mla.nope_dim :], torch.tensor(1.0)),
        ):  # fmt: skip
            torch.testing.assert_close(block, factor.expand_as(block), rtol=1e-5, atol=0.0)


def test_a_step_that_is_skipped_clips_nothing_and_is_forgotten(one_rank: Any) -> None:
    engine = make_engine({}, {"optim.qk_clip": TAU, "train.global_batch": 2})
    before = weights(engine)
    result = step(engine, lr=1e-3, max_grad_norm=1e-9)
    assert result.skipped and result.extra["train/qk_clipped_heads"] >= 4
    assert all(torch.equal(w, before[n]) for n, w in weights(engine).items())
    assert all(bool((a.max_logit == -torch.inf).all()) for a in attentions(engine.models))


def test_evaluation_notes_nothing_down(one_rank: Any) -> None:
    engine = make_engine({}, {"optim.qk_clip": TAU, "train.global_batch": 2})
    engine.evaluate(batches(engine.config, engine.layout, 0, SEED), 1)
    assert all(bool((a.max_logit == -torch.inf).all()) for a in attentions(engine.models))


@pytest.mark.parametrize("recompute", ["full", "unit", "selective"])
def test_recomputation_sees_each_logit_once(one_rank: Any, recompute: str) -> None:
    plain = step(make_engine({}, {"optim.qk_clip": TAU, "train.global_batch": 2}), lr=1e-3)
    again = step(
        make_engine({}, {"optim.qk_clip": TAU, "train.global_batch": 2, "train.recompute": recompute}), lr=1e-3
    )
    assert plain.extra == again.extra


@pytest.mark.parametrize("kind", ["adamw, state shared out, bf16", "muon, bf16"])
def test_a_checkpoint_goes_on_bit_for_bit(one_rank: Any, tmp_path: Path, kind: str) -> None:
    straight, resumed = straight_and_resumed({"optim.qk_clip": TAU, **KINDS[kind]}, tmp_path)
    assert resumed == straight
    assert sum(extra["train/qk_clipped_heads"] for _, _, extra in straight) > 0
