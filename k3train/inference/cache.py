"""What decoding keeps of the past: constant-size states for KDA layers, growing latents for MLA layers.

A KDA layer keeps its fp32 state [B, H, K, V] and the last conv_size - 1 inputs of its three convolutions. An MLA layer
keeps kv_lora_rank + shared_dim numbers a token. Attention residuals mix over depth inside one token and keep nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3train.config.schema import ModelConfig, expand_pattern


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
    """One entry a layer; lengths int64 [B]: tokens seen of each sequence."""

    layers: dict[int, KDACache | LatentCache]
    lengths: torch.Tensor
    capacity: int

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

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
    return Cache(layers, torch.zeros(batch, dtype=torch.int64, device=device), capacity)


def bytes_per_token(model: ModelConfig, bytes_per_number: int = 2) -> int:
    """Growth of the cache with each token: MLA layers alone grow."""
    full = expand_pattern(model.pattern, model.hybrid).count("F")
    return full * (model.mla.kv_lora_rank + model.mla.shared_dim) * bytes_per_number
