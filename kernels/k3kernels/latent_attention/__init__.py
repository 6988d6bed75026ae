"""Decoding against a cache of latents: `latent_attention` is the entry."""

from k3kernels.latent_attention.ops import latent_attention, latent_attention_torch

__all__ = ["latent_attention", "latent_attention_torch"]
