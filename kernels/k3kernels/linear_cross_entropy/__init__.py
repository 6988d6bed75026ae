"""A linear layer and the cross entropy of its output, without the whole output: `linear_cross_entropy` is the entry."""

from k3kernels.linear_cross_entropy.ops import automatic_chunk, linear_cross_entropy

__all__ = ["automatic_chunk", "linear_cross_entropy"]
