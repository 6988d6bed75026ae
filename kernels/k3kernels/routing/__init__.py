"""Routing of tokens to experts: selection, the histogram of quantile balancing, and moving rows without a host sync."""

from k3kernels.routing.ops import (
    Permutation,
    combine,
    dispatch,
    dispatch_twice,
    expert_counts,
    make_permutation,
    product_fp32,
    required_bias_counts,
    route,
)
from k3kernels.routing.reference import weigh

__all__ = [
    "Permutation",
    "combine",
    "dispatch",
    "dispatch_twice",
    "expert_counts",
    "make_permutation",
    "product_fp32",
    "required_bias_counts",
    "route",
    "weigh",
]
