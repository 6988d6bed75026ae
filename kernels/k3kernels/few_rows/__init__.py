"""Rows sorted by expert times experts in bfloat16 or fp32, for the few rows of a decode step."""

from k3kernels.few_rows.ops import few_rows_linear

__all__ = ["few_rows_linear"]
