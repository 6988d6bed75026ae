"""Rows sorted by expert times experts in MXFP4: `mxfp4_grouped_linear` is the entry, `decode` the readable decoder."""

from k3kernels.mxfp4.ops import mxfp4_grouped_linear
from k3kernels.mxfp4.reference import decode

__all__ = ["decode", "mxfp4_grouped_linear"]
