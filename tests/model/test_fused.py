"""The model's path through the GPU kernels, here with their torch stand-ins: losses and gradients of the plain path."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from k3kernels.gated_mla import assemble_keys, sigmoid_gate
from k3train.model import attention_residuals, build, recompute
from k3train.model.context import PackedStream
from k3train.model.k3 import K3Model
from k3train.parallel.layout import Layout, Sizes
from k3train.parallel.pipeline import Chunk
from k3train.parallel.transport import StageLink
from tests.model.test_recompute import build as build_model
from tests.model.test_recompute import run
from tests.parallel.tiny import micro_batch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("attention_residuals", "recompute", "k3"):
        monkeypatch.setattr(f"k3train.model.{module}.uses_kernels", lambda source: True)


def off(got: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """Largest relative difference of the losses and of every gradient."""
    pairs = {"losses": (got["losses"], want["losses"])}
    pairs |= {n: (got["gradients"][n], g) for n, g in want["gradients"].items()}
    return {n: float((a - b).norm() / b.norm().clamp_min(1e-12)) for n, (a, b) in pairs.items()}


@pytest.mark.parametrize("residuals", ["block", "full", "off"])
def test_the_losses_and_gradients_of_the_plain_path(
    one_rank: Layout, residuals: str, request: pytest.FixtureRequest
) -> None:
    want = run(build_model(one_rank, "none", residuals))
    request.getfixturevalue("kernels")
    differences = off(run(build_model(one_rank, "none", residuals)), want)
    assert max(differences.values()) < 1e-5, max(differences.items(), key=lambda item: item[1])


@pytest.mark.parametrize("residuals", ["block", "full"])
@pytest.mark.parametrize(
    ("mode", "layers"), [("full", None), ("unit", None), ("selective", None), ("full", 6), ("unit", 4)], ids=str
)
def test_recomputation_gives_the_same_bits(
    one_rank: Layout, kernels: None, mode: str, layers: int | None, residuals: str
) -> None:
    want = run(build_model(one_rank, "none", residuals), steps=2)
    got = run(build_model(one_rank, mode, residuals, layers=layers), steps=2)
    assert torch.equal(got["losses"], want["losses"])
    assert {n for n, g in got["gradients"].items() if not torch.equal(g, want["gradients"][n])} == set()


def test_mixes_are_recorded_as_on_the_plain_path(one_rank: Layout, request: pytest.FixtureRequest) -> None:
    def seen() -> dict[str, torch.Tensor]:
        model, found = build_model(one_rank, "none"), {}
        model.ctx.probe = lambda name, value: found.__setitem__(name, value.clone())
        run(model)
        return {n: t for n, t in found.items() if n.startswith(("depth.", "mix."))}

    want = seen()
    request.getfixturevalue("kernels")
    got = seen()
    assert want and got.keys() == want.keys()
    assert all(torch.allclose(got[n], t, atol=1e-5) for n, t in want.items())


def test_stages_that_keep_their_sources(one_rank: Layout, kernels: None) -> None:
    """Four stages of two pipeline ranks in one process, with the cross-stage cache, against the whole model."""
    whole = build_model(one_rank, "none")
    want = run(whole)
    ctx, sizes = whole.ctx, Sizes(pipeline=2, virtual=2)
    ranges = build.stage_ranges(ctx.model, sizes, None)
    table = build.stage_borders(ctx.model, sizes, None, "cached")
    assert any(table.cached(s) for s in range(4))
    chunks = [Chunk(s, *ranges[s], embeds=s == 0, heads=s == 3) for s in range(4)]
    models = [K3Model(ctx, chunk, virtual_stage=chunk.stage // 2) for chunk in chunks]
    source = dict(whole.named_parameters()) | dict(whole.named_buffers())
    with torch.no_grad():
        for model in models:
            for name, t in [*model.named_parameters(), *model.named_buffers()]:
                t.copy_(source[name])
    for s, model in enumerate(models):
        model.train().link = StageLink(table, s, models[s - 2].link if s >= 2 else None)
    batch = micro_batch([0, 1], seed=1)
    stream = PackedStream(batch["cu_seqlens"], batch["tokens"].numel(), 32)
    sent, received = [], []
    for model in models:
        if received or sent:
            received.append(sent[-1].detach().requires_grad_())
            model.set_input_tensor(received[-1])
        sent.append(model(batch["tokens"], batch["labels"], stream))
    (sent[-1] * batch["loss_mask"]).sum().backward()
    for out, leaf in zip(reversed(sent[:-1]), reversed(received)):
        out.backward(leaf.grad)
    got = {"losses": sent[-1].detach(), "gradients": {n: p.grad for m in models for n, p in m.named_parameters()}}
    differences = off(got, want)
    assert max(differences.values()) < 1e-5, max(differences.items(), key=lambda item: item[1])


def test_queries_still_to_come_in_a_block(one_rank: Layout) -> None:
    model = build_model(one_rank, "none")
    layers = [model.layers[str(i)] for i in range(len(model.layers))]
    size = model.ctx.model.residual_block
    assert [m.name for m in layers[0].mixes][:2] == ["mlp.0", "attention.1"]
    for i, layer in enumerate(layers):
        left = min(len(layers), (i // size + 1) * size) - i
        assert len(layer.mixes) == 2 * left - (i % size == 0)
    assert attention_residuals.uses_kernels(torch.zeros(1)) is False


@pytest.mark.parametrize("weighted", [False, True], ids=["logits twice", "gradients with the losses"])
def test_the_chunked_loss_is_that_of_whole_logits(one_rank: Layout, weighted: bool) -> None:
    model = build_model(one_rank, "none")
    model.ctx.model.loss_chunk = 10
    batch = micro_batch([0, 1], seed=1)
    found = []
    for whole in (True, False):
        model.zero_grad()
        stream = PackedStream(batch["cu_seqlens"], batch["tokens"].numel(), 32)
        if whole:
            logits = model(batch["tokens"], None, stream)
            losses = torch.nn.functional.cross_entropy(logits.float(), batch["labels"], reduction="none")
        else:
            stream.loss_weight = batch["loss_mask"] if weighted else None
            losses = model(batch["tokens"], batch["labels"], stream)
        ((losses * batch["loss_mask"]).sum() / 3).backward()
        found.append({"losses": losses.detach(), "gradients": {n: p.grad for n, p in model.named_parameters()}})
    differences = off(found[1], found[0])
    assert differences["losses"] < 1e-6
    assert max(differences.values()) < 1e-5, max(differences.items(), key=lambda item: item[1])


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_gated_mla_through_its_kernels(one_rank: Layout, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    want = run(build_model(one_rank, mode))
    for function in (assemble_keys, sigmoid_gate):
        kernel = functools.partial(function, backend="triton")
        monkeypatch.setattr(f"k3train.model.gated_mla.{function.__name__}", kernel)
    got = run(build_model(one_rank, mode))
    differences = off(got, want)
    assert max(differences.values()) < 1e-5, max(differences.items(), key=lambda item: item[1])
    assert got["kept"] <= want["kept"]


@pytest.mark.parametrize("policy", ["keep", "recompute", "fp8"])
def test_the_gate_kernel_under_each_policy(one_rank: Layout, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(recompute, "SMALLEST_IN_FP8", 0)
    ctx = build_model(one_rank, "none", activations={"gates": policy}).ctx
    generator = torch.Generator().manual_seed(0)
    o, gate, weight = (torch.randn(n, 64, generator=generator, requires_grad=True) for n in (5, 5, 3))
    kernel = functools.partial(sigmoid_gate, backend="triton")
    results: list[torch.Tensor] = []

    def product(y: torch.Tensor) -> torch.Tensor:
        results.append(y)
        return torch.nn.functional.linear(y, weight)

    out = recompute.consumed(ctx, "gates", kernel, o, gate, by=product, fused=True, elsewhere=(o,))
    assert (results[0].untyped_storage().size() == 0) == (policy == "recompute")
    plain = torch.nn.functional.linear(o * torch.sigmoid(gate), weight)
    torch.testing.assert_close(out, plain)
    found, wanted = (torch.autograd.grad(y.square().sum(), (o, gate, weight)) for y in (out, plain))
    for a, b in zip(found, wanted):
        error = float((a - b).norm() / b.norm())
        assert 1e-3 < error < 0.06 if policy == "fp8" else error < 1e-6
