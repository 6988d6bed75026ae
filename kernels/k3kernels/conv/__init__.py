"""Depthwise causal short convolution with SiLU.

`short_convolution` is the op on one tensor, `short_convolution_qkv` on a layer's three at once, and
`short_convolution_step` decodes with its state in place.
"""

from k3kernels.conv.ops import short_convolution, short_convolution_qkv, short_convolution_step

__all__ = ["short_convolution", "short_convolution_qkv", "short_convolution_step"]
