"""Depthwise causal short convolution with SiLU: `short_convolution` trains, `short_convolution_step` decodes."""

from k3kernels.conv.ops import short_convolution, short_convolution_step

__all__ = ["short_convolution", "short_convolution_step"]
