"""Sampling: greedy, temperature, top-k and top-p, over a batch of prompts of different lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from k3train.errors import ConfigError
from k3train.inference.cache import new_cache
from k3train.inference.decoder import Decoder


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. top_k 0 and top_p 1.0 keep every token; both may be set, top_k cuts first."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"generate.temperature={self.temperature} is negative; 0 is greedy, 1 samples as trained")
        if self.top_k < 0:
            raise ConfigError(f"generate.top_k={self.top_k} is negative; 0 keeps every token")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"generate.top_p={self.top_p} must lie in (0, 1]; 1 keeps every token")


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> torch.Tensor:
    """Next tokens int64 [B] from logits fp32 [B, V]."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    ranked, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ranked[:, sampling.top_k :] = float("-inf")
    if sampling.top_p < 1:
        p = torch.softmax(ranked, -1)
        ranked[p.cumsum(-1) - p >= sampling.top_p] = float("-inf")  # the token that crosses top_p stays
    picked = torch.multinomial(torch.softmax(ranked, -1), 1, generator=generator)
    return order.gather(1, picked)[:, 0]


def generate(
    decoder: Decoder, prompts: list[list[int]], max_tokens: int, sampling: Sampling, *, eos: int | None = None,
    prefill_chunk: int = 512,
) -> Iterator[list[int | None]]:  # fmt: skip
    """Yield, for each decoding step, the new token of every sequence; None where one has ended (after `eos`).

    Prompts are prefilled `prefill_chunk` tokens of each at a time. Raises ConfigError for an empty prompt.
    """
    if any(not p for p in prompts) or not prompts:
        raise ConfigError("a prompt without tokens cannot be continued; give at least one character")
    model = decoder.model
    device = model.ctx.device
    capacity = max(len(p) for p in prompts) + max_tokens
    cache = new_cache(model.ctx.model, len(prompts), capacity, dtype=model.ctx.dtype, device=device)
    logits = torch.empty(len(prompts), model.ctx.model.vocab_size, device=device)
    for start in range(0, max(len(p) for p in prompts), prefill_chunk):
        parts = [torch.tensor(p[start : start + prefill_chunk], dtype=torch.int64, device=device) for p in prompts]
        new = decoder.forward(parts, cache)
        fed = torch.tensor([part.numel() > 0 for part in parts], device=device)
        logits = torch.where(fed[:, None], new, logits)
    generator = torch.Generator(device=device).manual_seed(sampling.seed)
    ended = [False] * len(prompts)
    for position in range(max_tokens):
        tokens = choose(logits, sampling, generator)
        out: list[int | None] = []
        for b, token in enumerate(tokens.tolist()):
            out.append(None if ended[b] else token)
            ended[b] = ended[b] or token == eos
        yield out
        if all(ended) or position == max_tokens - 1:
            return
        logits = decoder.step(tokens, cache)
