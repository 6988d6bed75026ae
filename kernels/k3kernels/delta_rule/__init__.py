"""The delta rule (erase before write, no decay), the second rung of the ladder: `delta_rule` is the entry."""

from k3kernels.delta_rule.ops import delta_rule

__all__ = ["delta_rule"]
