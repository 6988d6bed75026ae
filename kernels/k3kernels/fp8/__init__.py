"""FP8 copies of tensors with one scale for every 128 values of a row: `quantise` and `dequantise`."""

from k3kernels.fp8.ops import BLOCK, FLOATS, dequantise, quantise

__all__ = ["BLOCK", "FLOATS", "dequantise", "quantise"]
