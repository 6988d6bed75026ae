"""Kimi Delta Attention: `kda` is the entry; `naive` the truth, `chunk_torch` the CPU path, `triton` the GPU path."""

from k3kernels.kda.ops import kda

__all__ = ["kda"]
