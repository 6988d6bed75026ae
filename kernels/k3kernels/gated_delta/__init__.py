"""The gated delta rule (one decay per head), the rung below KDA: `gated_delta` is the entry."""

from k3kernels.gated_delta.ops import gated_delta

__all__ = ["gated_delta"]
