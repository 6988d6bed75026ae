"""The arms that benchmarks/step.py compares with: what they are, seen on a CPU before a GPU's time is spent on them."""

from __future__ import annotations

import contextlib
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from k3train.config.compose import compose
from k3train.engine.megatron import MegatronEngine
from k3train.planning import parameters
from tests.parallel.tiny import batches as tiny_batches
from tests.parallel.tiny import perturb, tiny_config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fp8_loss
import moe_layer
import plain
import step as step_benchmark
import stock

CPU = torch.device("cpu")


def gradients(layout: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step of the tiny model, as the engine that trains it sees them."""
    config = tiny_config({"optim.clip_grad": 1e9})
    engine = MegatronEngine(config, layout, CPU)
    perturb(engine, seed=1)
    result = engine.step(tiny_batches(config, layout, 0, 1), 0.0, 4)
    return result.loss, {n: p.main_grad.clone() for n, p in engine.models[0].named_parameters()}


def test_the_plain_arm_is_the_same_model(one_rank: Any) -> None:
    """Naive recurrence, torch's convolutions, eager units, whole logits: the same loss and gradients in fp32."""
    loss, ours = gradients(one_rank)
    with plain.replaced("torch"):
        plain_loss, theirs = gradients(one_rank)
    assert abs(plain_loss - loss) < 1e-5
    assert list(ours) == list(theirs)
    for name, gradient in ours.items():
        scale = gradient.abs().max()
        assert (theirs[name] - gradient).abs().max() <= 2e-4 * scale + 1e-7, name


def test_the_plain_grouped_product_has_torchs_gradients() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(48, 16, generator=g).bfloat16().requires_grad_()
    weight = torch.randn(3, 32, 16, generator=g).bfloat16().requires_grad_()
    out = plain.GroupedLinear.apply(x, weight, torch.tensor([16, 16, 48], dtype=torch.int32))
    out.float().square().sum().backward()
    want = torch.cat([x[:16] @ weight[0].t(), x[16:] @ weight[2].t()])
    assert (out - want).abs().max() <= 0.02 * want.abs().max()
    assert weight.grad is not None and not weight.grad[1].any() and weight.grad[2].any()


def test_megatrons_transformer_has_the_active_parameters_of_ours() -> None:
    model = compose(["model=k3_proxy"]).model
    shape = stock.shape_of(model)
    ours, theirs = parameters.count(model), sum(shape.active().values())
    assert abs(theirs / ours.active - 1) < 0.02
    experts = (shape.layers - shape.dense_layers) * shape.experts * 3 * shape.hidden * shape.expert_hidden
    assert abs(experts / ours.routed_experts - 1) < 0.02, "and about its memory"
    said = stock.describe(model, shape, 8192)
    assert "active parameters" in said and f"{3 * sum(shape.flops(8192).values()):.4g}" in said


@pytest.mark.parametrize("packed", [True, False], ids=["packed documents", "whole sequences"])
def test_megatrons_transformer_trains_here(one_rank: Any, packed: bool) -> None:
    """The counted parameters are those of the built model, and its loss falls."""
    config = compose(
        ["model=k3_tiny", "model.pattern=KF", "model.vocab_size=128", "train.seq_length=32", "train.micro_batch=2",
         "train.global_batch=4", "train.precision=fp32"]
    )  # fmt: skip
    engine = stock.StockEngine(config, one_rank, CPU, packed=packed, recompute="none" if packed else "full")
    counted = 0
    for name, p in engine.models[0].named_parameters():
        if p.dim() == 2 and "embedding" not in name:
            routed = "experts" in name and "shared" not in name
            counted += p.numel() * engine.shape.top // engine.shape.experts if routed else p.numel()
    assert counted == sum(engine.shape.active().values())
    batches = list(step_benchmark.batches(config, 0, 2, whole=not packed))
    losses = [engine.step(iter(batches), 1e-2, engine.micro_batches(4)).loss for _ in range(3)]
    assert losses[-1] < losses[0] - 0.1, losses


@pytest.mark.parametrize("fails", [False, True], ids=["that trained", "that failed in its backward"])
def test_an_arm_gives_its_memory_back(one_rank: Any, fails: bool) -> None:
    """megatron's dispatcher keeps a tensor whose graph leads back to the model: a ring that Python does not see."""
    config = compose(
        ["model=k3_tiny", "model.pattern=KF", "model.vocab_size=128", "train.seq_length=32", "train.micro_batch=2",
         "train.global_batch=2", "train.precision=fp32"]
    )  # fmt: skip
    engine: Any = stock.StockEngine(config, one_rank, CPU)
    model = weakref.ref(engine.models[0])

    def stopped(gradient: torch.Tensor) -> None:
        raise TypeError("no such product")

    if fails:
        engine.models[0].decoder.layers[0].register_forward_hook(
            lambda *seen: seen[-1][0].register_hook(stopped) and None
        )
    with pytest.raises(TypeError, match="no such product") if fails else contextlib.nullcontext() as caught:
        engine.step(iter(list(step_benchmark.batches(config, 0, 1))), 1e-2, 1)
    step_benchmark.release(engine)
    del engine, caught
    step_benchmark.release(None)
    assert model() is None


def test_attention_inside_documents_is_the_sum_of_squares() -> None:
    config = compose(["model=k3_tiny", "train.seq_length=4096", "train.micro_batch=2", "train.global_batch=4"])
    whole = list(step_benchmark.batches(config, 0, 2, whole=True))
    assert [b["cu_seqlens"].tolist() for b in whole] == [[0, 4096, 8192]] * 2
    assert step_benchmark.square_share(iter(whole), 4096) == 1.0
    half = {"cu_seqlens": torch.tensor([0, 2048, 4096, 8192])}
    assert step_benchmark.square_share(iter([half]), 4096) == pytest.approx(0.75)


def test_the_arms_of_the_fp8_comparison_train_here(one_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can run without a GPU: the loop, the source of tokens and the comparison."""
    monkeypatch.setattr(fp8_loss, "LENGTH", 32)
    here = [
        "model=k3_tiny", "model.backend=local", "model.pattern=KF", "train.seq_length=32", "train.cuda_graphs=none",
        "train.precision=fp32", "model.vocab_size=4096",
    ]  # fmt: skip
    monkeypatch.setattr(fp8_loss, "MODEL", fp8_loss.MODEL[:1])
    losses = {name: fp8_loss.train(name, 2, [*here, *fp8_loss.MODEL[-2:-1]]) for name in ("bf16-0", "bf16-1")}
    losses["fp8_block-0"] = [x + 0.5 for x in losses["bf16-0"]]
    assert losses["bf16-0"] != losses["bf16-1"]
    said = fp8_loss.compared(losses)
    assert "2 seeds" in said[0] and said[1].endswith("minus bf16-0: +0.5000")
    assert fp8_loss.entropy() < losses["bf16-0"][-1]


@pytest.mark.parametrize("arm", ["fp8_cached", "activations_fp8", "long_whole", "stock_long_whole", "plain"])
def test_arms_of_the_step_compose(arm: str) -> None:
    assert compose([*step_benchmark.BASE, *step_benchmark.ARMS[arm]])


@pytest.mark.parametrize("arm", ["fp8_once-0", "activations-0", "experts-0"])
def test_arms_of_the_fp8_comparison_compose(arm: str) -> None:
    assert compose([*fp8_loss.MODEL, *fp8_loss.ARMS[arm][1]])


def test_the_layer_at_k3s_width_runs_in_small(one_rank: Any) -> None:
    from k3train.model.context import PackedStream

    layer, ctx, config = moe_layer.build("local", 8, "k3_tiny")
    assert compose(["model=k3", f"model.moe.experts={moe_layer.LOCAL}"]).model.moe.top_k == 16
    x = torch.randn(64, config.model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    stream = PackedStream(torch.tensor([0, 64], dtype=torch.int32), 64, 64)
    layer(x, stream).backward(torch.ones_like(x))
    moe_layer.buffer_gradients(layer)
    assert x.grad is not None and all(w.main_grad.shape == w.shape for w in layer.experts.parameters())
