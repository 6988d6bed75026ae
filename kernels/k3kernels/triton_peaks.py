"""The half of `peaks` that runs inside kernels: a program raises one of the slots to the largest magnitude it stores."""

import triton
import triton.language as tl

from k3kernels.peaks import SLOTS

_SLOTS: tl.constexpr = tl.constexpr(SLOTS)


@triton.jit
def raise_peak(slots_ptr, program, peak):
    """slots fp32 [SLOTS], zero or more; peak: fp32 scalar, zero or more, of the values as they are stored."""
    # no order with other accesses is asked for: the slots are read by a later kernel
    tl.atomic_max(slots_ptr + program % _SLOTS, peak, sem="relaxed")
