"""Attention residuals: `attention_residual` is one mix over depth, `DepthBlock` the mixes of a block of layers."""

from k3kernels.attention_residuals.ops import DepthBlock, attention_residual, first_phase_pays

__all__ = ["DepthBlock", "attention_residual", "first_phase_pays"]
