"""Prefill and decode equal the full forward, cut anywhere; batches of different lengths; the size of the cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from k3train.errors import ConfigError
from k3train.inference.cache import bytes_per_token, new_cache
from k3train.inference.decoder import Decoder
from k3train.inference.generate import Sampling, choose, generate
from tests.model.golden_model import build, load_golden, stream_of


@pytest.fixture(scope="module")
def model(one_rank, golden):  # type: ignore[no-untyped-def]
    return load_golden(build(one_rank, torch.float32), golden)


@pytest.fixture(scope="module")
def full(model, golden):  # type: ignore[no-untyped-def]
    """Two sequences of 70 tokens and their logits from the training path."""
    io = load_file(golden / "k3_tiny_a" / "io.safetensors")
    tokens, stream = stream_of(io, "seq")
    with torch.no_grad():
        logits = model(tokens, None, stream)
    assert float(logits.abs().max()) > LARGEST_LOGIT
    return tokens.view(2, 70), logits.view(2, 70, -1)


LARGEST_LOGIT = 4.0  # deviations are max|d| over max|logit| of the whole tensor, as the golden data measure them


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).abs().max()) < 1e-5 * LARGEST_LOGIT


@pytest.mark.parametrize("cut", [1, 2, 3, 17, 64, 69])
def test_prefill_then_decode_equals_the_full_forward_cut_at(model, full, cut: int) -> None:  # type: ignore[no-untyped-def]
    tokens, logits = full
    decoder = Decoder(model)
    cache = new_cache(model.ctx.model, 2, 70, dtype=torch.float32)
    got = decoder.forward([tokens[0, :cut], tokens[1, :cut]], cache, logits_of="all").view(2, cut, -1)
    assert close(got, logits[:, :cut])
    for t in range(cut, min(70, cut + 12)):
        step = decoder.forward([tokens[0, t : t + 1], tokens[1, t : t + 1]], cache)
        assert close(step, logits[:, t]), t


def test_prefill_in_uneven_chunks_equals_one_forward(model, full) -> None:  # type: ignore[no-untyped-def]
    tokens, logits = full
    decoder, cache = Decoder(model), new_cache(model.ctx.model, 1, 70, dtype=torch.float32)
    start = 0
    for size in (5, 1, 2, 31, 1, 30):
        got = decoder.forward([tokens[0, start : start + size]], cache, logits_of="all")
        assert close(got, logits[0, start : start + size])
        start += size


def test_sequences_of_different_lengths_do_not_see_each_other(model, full) -> None:  # type: ignore[no-untyped-def]
    tokens, logits = full
    decoder, cache = Decoder(model), new_cache(model.ctx.model, 2, 70, dtype=torch.float32)
    got = decoder.forward([tokens[0, :40], tokens[1, :7]], cache)
    assert close(got[0], logits[0, 39]) and close(got[1], logits[1, 6])
    got = decoder.forward([tokens[0, 40:41], tokens[1, 7:8]], cache)
    assert close(got[0], logits[0, 40]) and close(got[1], logits[1, 7])


def test_generation_of_a_batch_equals_generation_of_each_alone(model, full) -> None:  # type: ignore[no-untyped-def]
    tokens, _ = full
    decoder = Decoder(model)
    prompts = [tokens[0, :33].tolist(), tokens[1, :5].tolist()]
    together = list(generate(decoder, prompts, 8, Sampling(), prefill_chunk=16))
    for b, prompt in enumerate(prompts):
        alone = list(generate(decoder, [prompt], 8, Sampling(), prefill_chunk=4))
        assert [row[b] for row in together] == [row[0] for row in alone]


def test_greedy_generation_follows_the_full_forward(model, full) -> None:  # type: ignore[no-untyped-def]
    from k3train.model.context import PackedStream

    tokens, _ = full
    prompt = tokens[0, :9].tolist()
    wrote = [row[0] for row in generate(Decoder(model), [prompt], 6, Sampling())]
    ids = list(prompt)
    for expected in wrote:
        t = torch.tensor(ids)
        stream = PackedStream(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids), 0)
        with torch.no_grad():
            assert int(model(t, None, stream)[-1].argmax()) == expected
        ids.append(expected)


def test_a_sequence_ends_at_the_end_of_document_token(model, full) -> None:  # type: ignore[no-untyped-def]
    tokens, _ = full
    prompt = tokens[0, :9].tolist()
    first = next(iter(generate(Decoder(model), [prompt], 4, Sampling())))[0]
    assert list(generate(Decoder(model), [prompt], 4, Sampling(), eos=first)) == [[first]]


def test_the_cache_grows_with_full_attention_layers_alone(model) -> None:  # type: ignore[no-untyped-def]
    conf = model.ctx.model
    small, large = (new_cache(conf, 1, n, dtype=torch.bfloat16).bytes() for n in (64, 164))
    assert large - small == 100 * bytes_per_token(conf)
    every = dataclasses.replace(conf, pattern="F*9")
    assert bytes_per_token(conf) * 9 == bytes_per_token(every) * 3


def test_k3_keeps_24_of_93_of_the_bytes_of_attention_everywhere() -> None:
    from k3train.config.compose import compose

    k3 = compose(["model=k3"]).model
    every = dataclasses.replace(k3, pattern="F*93")
    assert bytes_per_token(k3) * 93 == bytes_per_token(every) * 24
    assert bytes_per_token(k3) == 24 * 576 * 2


def test_a_full_cache_is_refused(model, full) -> None:  # type: ignore[no-untyped-def]
    tokens, _ = full
    cache = new_cache(model.ctx.model, 1, 8, dtype=torch.float32)
    with pytest.raises(ConfigError, match="9 tokens do not fit the cache of 8"):
        Decoder(model).forward([tokens[0, :9]], cache)


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).repeat(2000, 1)
    generator = torch.Generator().manual_seed(0)
    assert set(choose(logits, Sampling(1.0, top_k=2), generator).tolist()) == {0, 1}
    assert set(choose(logits, Sampling(1.0, top_p=0.5), generator).tolist()) == {0}
    drawn = choose(logits, Sampling(1.0), generator).bincount(minlength=4) / 2000
    assert torch.allclose(drawn, torch.softmax(logits[0], -1), atol=0.05)
    assert choose(logits[:1], Sampling(), None).tolist() == [0]


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_bad_sampling_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Sampling(**bad)  # type: ignore[arg-type]
