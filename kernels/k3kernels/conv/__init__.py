"""Depthwise causal short convolution with SiLU: `short_convolution` is the entry."""

from k3kernels.conv.ops import short_convolution

__all__ = ["short_convolution"]
