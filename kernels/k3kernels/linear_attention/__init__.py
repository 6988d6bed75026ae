"""Causal linear attention without erase or decay, the first rung of the ladder: `linear_attention` is the entry."""

from k3kernels.linear_attention.ops import linear_attention

__all__ = ["linear_attention"]
