"""Recomputation changes what is kept, and nothing else: losses, gradients and counts to the last bit."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from k3train.model.build import build_chunks, chunks_of_rank, make_context
from k3train.model.context import PackedStream
from k3train.model.k3 import K3Model
from k3train.model.latent_moe import Router
from k3train.model.parameters import initialize_parameters
from k3train.parallel.layout import Layout
from tests.parallel.assemble import Seen
from tests.parallel.compare import train
from tests.parallel.tiny import micro_batch, tiny_model

MODES = ["full", "unit", "selective"]


def build(
    layout: Layout,
    recompute: str,
    attention_residuals: str = "block",
    dtype: torch.dtype = torch.float32,
    activations: dict[str, str] | None = None,
    layers: int | None = None,
) -> K3Model:
    model = dataclasses.replace(tiny_model(), attention_residuals=attention_residuals)
    ctx = make_context(
        model, layout, dtype, torch.device("cpu"), recompute=recompute, recompute_layers=layers, activations=activations
    )
    built = build_chunks(ctx, chunks_of_rank(model, layout.sizes, 0, None), seed=0)[0].train()
    initialize_parameters(built, layout, seed=5)
    with torch.no_grad():  # queries that act
        for name, p in built.named_parameters():
            if name.endswith("query"):
                p.copy_(torch.linspace(-0.5, 0.5, p.numel()))
    return built


def run(model: K3Model, *, steps: int = 1) -> dict[str, Any]:
    """Losses of the tokens, gradients, counts; elements and bytes of what the graph keeps (parameters apart)."""
    saved: list[
        weakref.ref[torch.Tensor]
    ] = []  # by weak reference: what the graph dropped frees its address for others

    def keep(t: torch.Tensor) -> torch.Tensor:
        if not isinstance(t, torch.nn.Parameter):
            saved.append(weakref.ref(t))
        return t

    batch = micro_batch([0, 1], seed=1)
    model.zero_grad()
    for _ in range(steps):
        stream = PackedStream(batch["cu_seqlens"], batch["tokens"].numel(), 32)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            losses = model(batch["tokens"], batch["labels"], stream)
        held = [t.untyped_storage() for t in (ref() for ref in saved) if t is not None]
        kept = sum({s.data_ptr(): s.nbytes() for s in held}.values())
        saved.clear()
        (losses * batch["loss_mask"]).sum().backward()
    routers = {m.layer: m for m in model.modules() if isinstance(m, Router)}
    return {
        "losses": losses.detach(), "gradients": {n: p.grad for n, p in model.named_parameters()},
        "load": {i: r.load for i, r in routers.items()}, "counts": {i: r.counts for i, r in routers.items()},
        "kept": kept,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("residuals", "dtype"),
    [("block", torch.float32), ("full", torch.float32), ("off", torch.float32), ("block", torch.bfloat16)],
    ids=["block residuals", "full residuals", "no residuals", "block residuals in bf16"],
)
@pytest.mark.parametrize("mode", MODES)
def test_losses_gradients_and_counts_are_the_same_bits(
    one_rank: Layout, mode: str, residuals: str, dtype: torch.dtype
) -> None:
    want = run(build(one_rank, "none", residuals, dtype), steps=2)
    got = run(build(one_rank, mode, residuals, dtype), steps=2)
    assert torch.equal(got["losses"], want["losses"])
    assert {n for n, g in got["gradients"].items() if g is None or not torch.equal(g, want["gradients"][n])} == set()
    for what in ("load", "counts"):
        for layer, value in want[what].items():
            assert torch.equal(got[what][layer], value), (what, layer)
            assert what == "counts" or int(value.sum()) == 2 * 64 * 2  # steps, tokens, experts a token


def test_each_mode_keeps_less_than_the_one_before(one_rank: Layout) -> None:
    kept = {mode: run(build(one_rank, mode))["kept"] for mode in ["none", "selective", "full", "unit"]}
    assert kept["selective"] < 0.75 * kept["none"]
    assert kept["full"] < 0.25 * kept["none"]
    assert kept["unit"] < kept["full"]


@pytest.mark.parametrize("residuals", ["block", "full", "off"])
@pytest.mark.parametrize(("mode", "layers"), [("unit", 4), ("unit", 8), ("full", 3)], ids=str)
def test_only_the_first_layers_run_again_and_bits_stay(
    one_rank: Layout, mode: str, layers: int, residuals: str
) -> None:
    want = run(build(one_rank, "none", residuals), steps=2)
    model, calls = build(one_rank, mode, residuals, layers=layers), Counter[int]()
    for layer in model.layers.values():
        layer.register_forward_hook(lambda layer, *_: calls.update([layer.index]))
    got = run(model, steps=2)
    assert calls == {i: 2 * (2 if i < layers else 1) for i in range(9)}
    assert torch.equal(got["losses"], want["losses"])
    assert {n for n, g in got["gradients"].items() if g is None or not torch.equal(g, want["gradients"][n])} == set()
    for layer, load in want["load"].items():
        assert torch.equal(got["load"][layer], load), layer
        assert torch.equal(got["counts"][layer], want["counts"][layer]), layer


def test_every_unit_that_is_kept_adds_what_its_layers_keep(one_rank: Layout) -> None:
    kept = [run(build(one_rank, "unit", layers=layers))["kept"] for layers in (9, 8, 4)]
    assert kept[0] == run(build(one_rank, "unit"))["kept"]
    assert kept == sorted(kept) and kept[2] < run(build(one_rank, "none"))["kept"]
    assert kept[2] - kept[1] > 2 * (kept[1] - kept[0]), "four layers against one"


def test_statistics_are_recorded_once(one_rank: Layout) -> None:
    seen: dict[str, dict[str, int]] = {}
    for mode in ["none", *MODES]:
        model = build(one_rank, mode)
        names = seen.setdefault(mode, {})
        model.ctx.probe = lambda name, value, names=names: names.__setitem__(name, names.get(name, 0) + 1)
        run(model)
    assert set(seen["none"].values()) == {1}
    assert all(names == seen["none"] for names in seen.values())


def test_evaluation_counts_nothing_and_keeps_nothing(one_rank: Layout) -> None:
    model = build(one_rank, "full").eval()
    batch = micro_batch([0, 1], seed=1)
    with torch.no_grad():
        model(batch["tokens"], batch["labels"], PackedStream(batch["cu_seqlens"], 64, 32))
    assert all(m.load is None for m in model.modules() if isinstance(m, Router))


@functools.cache
def observed(mode: str, layout: tuple[tuple[str, int], ...]) -> Seen:
    return train(4, dict(layout), {"train.recompute": mode, "train.micro_batch": 1, "train.global_batch": 4}, steps=1)[
        0
    ]


CONTEXT_TENSOR, PIPELINE_EXPERT = {"context": 2, "tensor": 2}, {"pipeline": 2, "virtual": 2, "expert": 2}


@pytest.mark.parametrize(
    ("sizes", "mode"),
    [
        (PIPELINE_EXPERT, "full"),
        *(pytest.param(*case, marks=pytest.mark.ops) for case in
          [(CONTEXT_TENSOR, "selective"), (CONTEXT_TENSOR, "unit"), (CONTEXT_TENSOR, "full"), (PIPELINE_EXPERT, "selective"),
           (PIPELINE_EXPERT, "unit")]),
    ],
    ids=str,
)  # fmt: skip
def test_a_step_of_four_ranks_is_the_same_step(mode: str, sizes: dict[str, int]) -> None:
    layout = tuple(sizes.items())
    got, want = observed(mode, layout), observed("none", layout)
    assert (got.loss, got.grad_norm, got.tokens) == (want.loss, want.grad_norm, want.tokens)
    assert torch.equal(got.load, want.load)
    assert {n for n, g in got.gradients.items() if not torch.equal(g, want.gradients[n])} == set()


@pytest.mark.parametrize("kind", ["units", "gates", "norms"])
def test_a_class_of_tensors_alone_is_computed_again(one_rank: Layout, kind: str) -> None:
    want = run(build(one_rank, "none"))
    got = run(build(one_rank, "none", activations={kind: "recompute"}))
    assert {n for n, g in got["gradients"].items() if not torch.equal(g, want["gradients"][n])} == set()
    assert got["kept"] < want["kept"]
    kept = run(build(one_rank, "selective", activations={kind: "keep"}))["kept"]
    assert kept > run(build(one_rank, "selective"))["kept"]


@pytest.mark.parametrize("kind", ["units", "gates"])
def test_a_class_kept_in_fp8_changes_no_loss_and_rounds_gradients(
    one_rank: Layout, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3train.model import recompute

    monkeypatch.setattr(recompute, "SMALLEST_IN_FP8", 0)
    want = run(build(one_rank, "none", dtype=torch.bfloat16))
    got = run(build(one_rank, "none", dtype=torch.bfloat16, activations={kind: "fp8"}))
    assert torch.equal(got["losses"], want["losses"])
    for layer, load in want["load"].items():
        assert torch.equal(got["load"][layer], load), "every token goes to the same experts"
    assert got["kept"] < want["kept"]
    total = sum(float(g.double().square().sum()) for g in want["gradients"].values() if g is not None) ** 0.5
    errors = {
        name: float((got["gradients"][name].double() - g.double()).norm()) / max(float(g.double().norm()), 1e-3 * total)
        for name, g in want["gradients"].items() if g is not None
    }  # fmt: skip
    assert max(errors.values()) < 0.06, max(errors.items(), key=lambda item: item[1])
    assert max(errors.values()) > 1e-3, "and they are rounded"


def test_what_is_kept_in_fp8_is_neither_parameters_nor_what_others_hold(
    one_rank: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3train.model import recompute

    monkeypatch.setattr(recompute, "SMALLEST_IN_FP8", 0)
    weight = torch.nn.Parameter(torch.randn(40, 64))
    x, shared = torch.randn(8, 64, requires_grad=True), torch.randn(8, 64, requires_grad=True)
    with recompute.in_fp8((shared,)):
        out = torch.nn.functional.linear(x * shared, weight)
    out.backward(torch.ones_like(out))
    ones = torch.ones(8, 40) @ weight
    assert torch.equal(x.grad, ones * shared), "what the other tensor holds and the weight are exact"
    want = (ones * x).detach()
    error = (shared.grad - want).abs() / want.abs()
    assert 1e-3 < float(error.max()) <= 1 / 16


@pytest.mark.parametrize("mode", ["full", "unit"])
def test_layer_inputs_may_wait_in_host_memory(one_rank: Layout, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3train.model import recompute

    moved: list[int] = []
    real = torch.Tensor.copy_
    want = run(build(one_rank, "none"))
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda a, b, *rest, **named: moved.append(b.numel()) or real(a, b, *rest, **named)
    )
    got = run(build(one_rank, mode, activations={"layer_inputs": "offload"}))
    assert {n for n, g in got["gradients"].items() if not torch.equal(g, want["gradients"][n])} == set()
    inputs = [n for n in moved if n == 64 * 32]  # tokens, width
    assert len(inputs) >= (9 if mode == "full" else 3)
    assert recompute.policy(build(one_rank, mode).ctx, "layer_inputs") == "keep"


@pytest.mark.gpu
def test_offloaded_tensors_come_back_whole() -> None:
    from k3train.model.recompute import offloaded

    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    with offloaded():
        y = (x * 2).sin().square()
    saved = torch.cuda.memory_allocated() - before
    y.sum().backward()
    want = 4 * torch.sin(2 * x.detach()) * torch.cos(2 * x.detach())
    torch.testing.assert_close(x.grad, want)
    assert saved < 2 * x.nbytes  # y, and neither of the two tensors that backward reads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_one_product_reads_is_not_kept_and_comes_back(one_rank: Layout, dtype: torch.dtype) -> None:
    from k3train.model.recompute import consumed

    ctx = build(one_rank, "selective").ctx
    weight = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    gate, up = (torch.randn(4, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    seen: list[torch.Tensor] = []

    def product(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden)
        return torch.nn.functional.linear(hidden, weight)

    for fused in (False, True):
        out = consumed(ctx, "units", lambda a, b: a.sigmoid() * b, gate, up, by=product, fused=fused)
        assert seen[-1].untyped_storage().size() == 0
        got = torch.autograd.grad(out.square().sum(), (gate, up, weight))
        want = torch.autograd.grad(product(gate.sigmoid() * up).square().sum(), (gate, up, weight))
        assert all(torch.equal(a, b) for a, b in zip(got, want))
