"""Products of experts over rows sorted by expert: `add_weight_gradient` is the entry."""

from k3kernels.grouped.ops import add_weight_gradient

__all__ = ["add_weight_gradient"]
