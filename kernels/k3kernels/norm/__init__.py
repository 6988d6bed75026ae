"""Gated RMS norm of the attention output: `gated_rms_norm` is the entry."""

from k3kernels.norm.ops import gated_rms_norm

__all__ = ["gated_rms_norm"]
