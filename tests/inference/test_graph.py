"""On a GPU a decode step is a captured graph: the same tokens as step by step, for caches of any size, one after another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from k3train.inference.cache import new_cache
from k3train.inference.decoder import PLAIN_STEPS, Decoder
from k3train.inference.generate import Sampling, generate
from k3train.inference.loading import build_decoder
from k3train.parallel.layout import Layout
from k3train.weights.opening import open_hf
from tests.weights.helpers import golden_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [[5, 17, 99, 3, 64, 2, 8], [1, 2]]


@pytest.fixture(scope="module", params=[False, True], ids=["bf16 experts", "packed experts"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_rank: Layout) -> Decoder:
    folder: Path = golden_folder(tmp_path_factory.mktemp("graph") / "model", packed=request.param)
    return build_decoder(open_hf(folder), one_rank, torch.device("cuda"), "bf16", packed=request.param)


def steps_of(decoder: Decoder, graphs: bool, count: int) -> torch.Tensor:
    """Logits of `count` steps behind the prompts, [count, B, V]; the same tokens either way."""
    decoder.graphs = graphs
    ctx = decoder.model.ctx
    cache = new_cache(ctx.model, len(PROMPTS), 32, dtype=ctx.dtype, device=ctx.device)
    decoder.forward([torch.tensor(p, device=ctx.device) for p in PROMPTS], cache)
    rows = []
    for i in range(count):
        tokens = torch.tensor([3 * i + 1, 2 * i + 5], device=ctx.device)
        rows.append(decoder.step(tokens, cache).clone())
    decoder.graphs = True
    return torch.stack(rows)


def test_a_replayed_step_gives_the_logits_of_a_plain_one(decoder: Decoder) -> None:
    plain, replayed = (steps_of(decoder, graphs, PLAIN_STEPS + 8) for graphs in (False, True))
    assert torch.equal(plain, replayed)


def test_a_step_does_not_wait_for_the_device(decoder: Decoder) -> None:
    ctx = decoder.model.ctx
    cache = new_cache(ctx.model, 2, 32, dtype=ctx.dtype, device=ctx.device)
    tokens = torch.tensor([4, 7], device=ctx.device)
    for _ in range(PLAIN_STEPS + 1):
        decoder.step(tokens, cache)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder.step(tokens, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_generation_is_the_same_with_and_without_graphs_again_and_again(decoder: Decoder) -> None:
    decoder.graphs = False
    plain = list(generate(decoder, PROMPTS, 12, Sampling()))
    decoder.graphs = True
    for _ in range(2):
        assert list(generate(decoder, PROMPTS, 12, Sampling())) == plain
