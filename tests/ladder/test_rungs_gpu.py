"""Every rung of the ladder on a GPU: the loss and the gradients of a CPU, and a loss that falls."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from k3train.config.compose import compose
from k3train.ladder import arms
from k3train.model.build import build_chunks, chunks_of_rank, make_context
from k3train.model.context import PackedStream
from k3train.model.k3 import K3Model

pytestmark = pytest.mark.gpu
rungs = pytest.mark.parametrize("name", arms.MIXERS)


def built(layout: Any, name: str, device: torch.device) -> K3Model:
    model = compose(["experiment=ladder", *arms.mixer(name)]).model
    ctx = make_context(model, layout, torch.float32, device)
    return build_chunks(ctx, chunks_of_rank(model, layout.sizes, 0, None), seed=0)[0]


def differentiated(model: K3Model, device: torch.device) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss of three packed documents, and every parameter's gradient, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 115, (150,), generator=generator).to(device)
    stream = PackedStream(torch.tensor([0, 52, 55, 150], dtype=torch.int32, device=device), 150, 0)
    loss = model(tokens, tokens.roll(-1), stream).mean()
    loss.backward()
    return float(loss), {n: p.grad.double().cpu() for n, p in model.named_parameters()}  # type: ignore[union-attr]


def check_gradients(layout: Any, name: str, device: torch.device) -> None:
    here, there = built(layout, name, torch.device("cpu")), built(layout, name, device)
    there.load_state_dict(here.state_dict())  # each device draws its own random numbers
    want_loss, want = differentiated(here, torch.device("cpu"))
    loss, got = differentiated(there, device)
    assert loss == pytest.approx(want_loss, abs=1e-4)
    whole = math.sqrt(sum(float(g.square().sum()) for g in want.values()))
    for parameter, gradient in want.items():
        assert float((got[parameter] - gradient).norm()) < 1e-3 * float(gradient.norm()) + 1e-5 * whole, parameter


def check_training(layout: Any, name: str, device: torch.device, *words: str) -> None:
    from k3train.engine.megatron import MegatronEngine
    from k3train.train.data import prepare_data

    config = compose(["experiment=ladder", *arms.mixer(name), "train.steps=60", *words])
    engine = MegatronEngine(config, layout, device)
    train = prepare_data(config, layout, device, lambda _: None).train
    losses = []
    for step in range(60):
        result = engine.step(train.batches(16 * step, 1), 1e-2, 1)
        assert not result.skipped and math.isfinite(result.loss)
        losses.append(result.loss)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5, losses


@rungs
def test_a_rung_has_the_loss_and_the_gradients_of_a_cpu(one_rank: Any, name: str) -> None:
    check_gradients(one_rank, name, torch.device("cuda", 0))


@rungs
def test_a_rung_learns(one_rank: Any, name: str) -> None:
    check_training(one_rank, name, torch.device("cuda", 0))
