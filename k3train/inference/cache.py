"""What decoding keeps of the past: constant-size states for KDA layers, growing latents for MLA layers.

A KDA layer keeps its fp32 state [B, H, K, V] and the last conv_size - 1 inputs of its three convolutions. An MLA layer
keeps kv_lora_rank + shared_dim numbers a token. Attention residuals mix over depth inside one token and keep nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3train.config.schema import ModelConfig, expand_pattern
from k3train.errors import ConfigError


@dataclass
class KDACache:
    """state fp32 [B, H, K, V]; q, k, v: the last inputs of the convolutions, each [B, H * K, conv_size - 1]."""

    state: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass
class LatentCache:
    """latents [B, capacity, kv_lora_rank + shared_dim]; how many are filled is the whole cache's `lengths`."""

    latents: torch.Tensor


@dataclass
class Cache:
    """One entry a layer; lengths int64 [B]: tokens seen of each sequence, and `seen`, the same on the host.

    Tensors never move while a cache lives, so that a captured graph may hold their addresses.
    """

    layers: dict[int, KDACache | LatentCache]
    lengths: torch.Tensor
    capacity: int
    seen: list[int]

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    def room_for(self, counts: list[int]) -> None:
        """Raises ConfigError when a sequence with counts[b] more tokens would outgrow the cache."""
        longest = max(n + more for n, more in zip(self.seen, counts))
        if longest > self.capacity:
            raise ConfigError(f"{longest} tokens do not fit the cache of {self.capacity}; make it larger")

    def note(self, counts: list[int]) -> None:
        """counts[b] more tokens were seen; `lengths` on the device is not touched."""
        self.seen = [n + more for n, more in zip(self.seen, counts)]

    def bytes(self) -> int:
        """Bytes held, all layers together."""
        total = 0
        for layer in self.layers.values():
            for tensor in vars(layer).values():
                total += tensor.numel() * tensor.element_size()
        return total


def new_cache(
    model: ModelConfig, batch: int, capacity: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Cache:
    """An empty cache for `batch` sequences of at most `capacity` tokens each."""
    layers: dict[int, KDACache | LatentCache] = {}
    heads, size = model.kda.heads, model.kda.head_dim
    width = heads * size
    for index, kind in enumerate(expand_pattern(model.pattern, model.hybrid)):
        if kind == "F":
            latent = model.mla.kv_lora_rank + model.mla.shared_dim
            layers[index] = LatentCache(torch.zeros(batch, capacity, latent, dtype=dtype, device=device))
        else:
            tails = [torch.zeros(batch, width, model.kda.conv_size - 1, dtype=dtype, device=device) for _ in range(3)]
            state = torch.zeros(batch, heads, size, size, dtype=torch.float32, device=device)
            layers[index] = KDACache(state, *tails)
    return Cache(layers, torch.zeros(batch, dtype=torch.int64, device=device), capacity, [0] * batch)


def bytes_per_token(model: ModelConfig, bytes_per_number: int = 2) -> int:
    """Growth of the cache with each token: MLA layers alone grow."""
    full = expand_pattern(model.pattern, model.hybrid).count("F")
    return full * (model.mla.kv_lora_rank + model.mla.shared_dim) * bytes_per_number
