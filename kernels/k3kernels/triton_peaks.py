"""What kernels share that find the peak of a tensor they write (`k3kernels.peaks`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels import peaks

SLOTS = tl.constexpr(peaks.SLOTS)


@triton.jit
def neighbours_peak(x, EACH: tl.constexpr):
    """max |x| of every EACH neighbours in the last dimension, flat: [x.numel / EACH].

    A thread holds so many of a tile, which makes this free of talk between threads, and what a loop carries small.
    """
    return tl.max(tl.reshape(tl.abs(x), [x.numel // EACH, EACH]), 1)


@triton.jit
def raise_peak(slots_ptr, magnitudes, kind: tl.constexpr):
    """Raise one of the slots fp32 [SLOTS], neighbouring programs different ones, to the largest of `magnitudes` fp32.

    It is rounded to `kind`, in which the tensor is stored: rounding keeps the order, so this is the largest as stored.
    Magnitudes are in order as integers too.
    """
    program = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
    highest = tl.max(magnitudes).to(kind).to(tl.float32)
    place = (slots_ptr + program % SLOTS).to(tl.pointer_type(tl.int32))
    tl.atomic_max(place, highest.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def scale_kernel(slots_ptr, scale_ptr, largest, COUNT: tl.constexpr, BLOCK: tl.constexpr, POWER: tl.constexpr):
    """One program. slots fp32 [COUNT], scale fp32 [1]; `k3kernels.peaks.peak_scale`."""
    at = tl.arange(0, BLOCK)
    peak = tl.max(tl.load(slots_ptr + at, mask=at < COUNT, other=0.0))
    scale = tl.minimum(tl.div_rn(tl.cast(largest, tl.float32), peak), 3.4028234663852886e38)
    if POWER:
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    tl.store(scale_ptr, tl.where((peak > 0) & (peak < float("inf")), scale, 1.0))


def peak_scale_triton(slots: Tensor, largest: float, power_of_two: bool) -> Tensor:
    """`k3kernels.peaks.peak_scale` on Triton; slots contiguous."""
    scale = torch.empty(1, dtype=torch.float32, device=slots.device)
    count = slots.numel()
    scale_kernel[(1,)](
        slots, scale, largest, COUNT=count, BLOCK=triton.next_power_of_2(count), POWER=power_of_two, num_warps=1
    )
    return scale
