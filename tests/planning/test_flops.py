"""The FLOP convention against torch's counter, and against numbers worked out by hand."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from k3train.config.compose import compose
from k3train.config.schema import ModelConfig
from k3train.planning import flops, parameters


@functools.cache
def model_of(*overrides: str) -> ModelConfig:
    return compose(list(overrides)).model


def counted(program) -> int:  # noqa: ANN001
    with FlopCounterMode(display=False) as counter:
        program()
    return counter.get_total_flops()


def products(shapes: list[tuple[int, int]], tokens: int):  # noqa: ANN201
    """A program of forward and backward through one linear map a shape (in, out)."""
    weights = [torch.randn(out, inp, requires_grad=True) for inp, out in shapes]
    inputs = [torch.randn(tokens, inp, requires_grad=True) for inp, _ in shapes]

    def run() -> None:
        for x, w in zip(inputs, weights):
            (x @ w.T).sum().backward()

    return run


def test_projections_experts_and_head_agree_with_torch() -> None:
    m, tokens = model_of(), 32
    d, inner, size, a = m.hidden_size, m.kda.heads * m.kda.head_dim, m.kda.head_dim, m.mla
    kda = [(d, inner)] * 4 + [(d, size), (size, inner), (d, m.kda.heads), (inner, d)]
    query = a.heads * (a.nope_dim + a.shared_dim)
    values = a.heads * a.v_dim
    mla = [(d, a.q_lora_rank), (a.q_lora_rank, query), (d, a.kv_lora_rank + a.shared_dim), (d, values), (values, d)]
    mla += [(a.kv_lora_rank, a.heads * a.nope_dim + values)]
    shared = m.moe.shared_experts * m.moe.expert_hidden
    expert = [(m.moe.latent, m.moe.expert_hidden)] * 2 + [(m.moe.expert_hidden, m.moe.latent)]
    moe = [(d, m.moe.experts), (d, m.moe.latent), (m.moe.latent, d), (d, shared), (d, shared), (shared, d)]
    moe += expert * m.moe.top_k
    dense = [(d, m.dense_hidden)] * 2 + [(m.dense_hidden, d)]
    shapes = kda * 6 + mla * 3 + moe * 8 + dense + [(d, m.vocab_size)]

    parts = flops.forward(m, 256).by_part()
    ours = 3 * tokens * sum(v for name, v in parts.items() if name not in ("linear_recurrence", "full_attention"))
    assert counted(products(shapes, tokens)) == pytest.approx(ours, rel=0.01)


def test_causal_attention_is_half_of_what_torch_counts() -> None:
    m, s = model_of(), 64
    q = torch.randn(1, m.mla.heads, s, m.mla.nope_dim + m.mla.shared_dim)
    v = torch.randn(1, m.mla.heads, s, m.mla.v_dim)
    full = counted(lambda: torch.softmax(q @ q.mT, -1) @ v)
    assert flops.forward(m, s).full_attention * s == pytest.approx(3 * full / 2)


def test_recurrence_counts_the_products_of_the_chunk_form() -> None:
    m = model_of()
    size, chunk = m.kda.head_dim, flops.CHUNK
    q, k, v, state, lower = (torch.randn(*s) for s in [(chunk, size)] * 3 + [(size, size), (chunk, chunk)])
    causal = counted(lambda: (k @ k.T, q @ k.T, lower @ v, lower @ v)) / 2
    dense = counted(lambda: (k @ state, q @ state, k.T @ v))
    inverse = chunk**3 / 3
    assert flops.recurrence(m, 256) * chunk == pytest.approx(causal + dense + inverse)


def test_recurrence_does_not_grow_with_the_sequence_and_attention_does() -> None:
    short, long = (flops.forward(model_of(), s) for s in (256, 512))
    assert short.linear_recurrence == long.linear_recurrence
    assert long.full_attention == 2 * short.full_attention


def test_embedding_is_not_counted_and_the_head_is() -> None:
    m = model_of()
    assert flops.forward(m, 64).head == 2 * m.hidden_size * m.vocab_size
    assert flops.flops_per_token(m, 64) < 6 * parameters.count(m).total


def test_formula_names_every_part_and_the_total() -> None:
    m = model_of("model=k3")
    text = flops.formula(m, 8192)
    assert all(name in text for name, value in flops.forward(m, 8192).by_part().items() if value)
    assert f"{flops.flops_per_token(m, 8192):.4g}" in text


def test_mfu_of_the_peak_is_one() -> None:
    m = model_of()
    speed = 2 * flops.PEAK_TFLOPS * 1e12 / flops.flops_per_token(m, 256)
    assert flops.mfu(m, 256, speed, devices=2) == pytest.approx(1.0)


def test_multi_token_prediction_costs_its_layer_and_the_head_again() -> None:
    plain, further = model_of(), model_of("model.mtp_layers=1")
    more = flops.forward(further, 256).total - flops.forward(plain, 256).total
    layer = flops.forward(model_of("model.pattern=F", "model.dense_layers=0"), 256)  # one Gated MLA and LatentMoE layer
    assert more == layer.total + 2 * 2 * plain.hidden_size**2  # and the fusion of hidden state and embedding
    assert parameters.count(further).active == parameters.count(plain).active
