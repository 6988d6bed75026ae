"""The largest magnitude of a tensor, found by the kernel that writes it, for whoever rounds it to FP8 next.

Rounding with one scale for a whole tensor reads it twice: once for its peak, once to round. A kernel that has the values
in registers finds the peak on its way, so the first reading falls away. Whether a peak is wanted is one switch of the process
(`PEAKS.wanted`), and kernels are compiled without it where it is off.

A note holds its tensor's storage weakly: no memory lives longer for it, and while the note stands no other storage can be
taken for this one. `take` finds it through any views of the whole that autograd makes in between, as often as it is asked
(one gradient may enter two products); a tensor written in place since, which a sum of gradients may be, is not found.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

SLOTS = 32
"""Numbers a peak is spread over: programs of a kernel meet at different ones. The peak is the largest of them."""

HELD = 32
"""Notes; of more, the oldest are forgotten. The backward of a layer makes at most five that wait together (KDA: of o_proj's
output, of the output gate, of q, k and v), and a unit of four layers computed again makes sixteen between a gradient's and
the product that it enters."""

BACKENDS = ("auto", "torch", "triton")


class Numbers:
    """The numbers that a tensor holds now, recognised later without holding memory for it.

    The storage is referred to weakly: while this stands, no other one can be taken for it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self.place, self._contents = self.place_of(tensor), self._contents_of(tensor)

    def are(self, tensor: Tensor) -> bool:
        """Whether `tensor` is contiguous and holds these numbers, in this order and all of them."""
        same = tensor.is_contiguous() and self.place_of(tensor) == self.place
        return same and self._contents_of(tensor) == self._contents

    @staticmethod
    def place_of(tensor: Tensor) -> tuple[int, int]:
        return tensor.untyped_storage()._cdata, int(tensor.storage_offset())

    @staticmethod
    def _contents_of(tensor: Tensor) -> tuple[object, ...]:
        """What changes when the place holds other numbers: a resized storage lies elsewhere and keeps its version."""
        return tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor._version


class Peaks:
    """Peaks of tensors that kernels have written lately."""

    def __init__(self) -> None:
        self.wanted = False
        self._notes: OrderedDict[tuple[int, int], tuple[Numbers, Tensor]] = OrderedDict()

    def slots(self, device: torch.device, *tensors: int) -> Tensor | None:
        """Zeros fp32 [*tensors, SLOTS] for a kernel to raise, or None where no peak is wanted."""
        return torch.zeros(*tensors, SLOTS, dtype=torch.float32, device=device) if self.wanted else None

    def note(self, tensor: Tensor, slots: Tensor | None) -> None:
        """slots [SLOTS]: at least the magnitude of every element of `tensor` as it is stored, and one of them equal to the
        largest. Nothing is noted of None, nor of tensors that cannot tell whether they were written to."""
        if slots is None or tensor.is_inference() or not tensor.is_contiguous():
            return
        numbers = Numbers(tensor)
        self._notes.pop(numbers.place, None)
        self._notes[numbers.place] = numbers, slots
        if len(self._notes) > HELD:
            self._notes.popitem(last=False)

    def note_each(self, tensors: list[Tensor], slots: Tensor | None) -> None:
        """`note` of several, slots [tensors, SLOTS]."""
        if slots is not None:
            for tensor, own in zip(tensors, slots.unbind(0), strict=True):
                self.note(tensor, own)

    def take(self, tensor: Tensor) -> Tensor | None:
        """The slots fp32 [SLOTS] noted for these very numbers; None where nobody noted them."""
        numbers, slots = self._notes.get(Numbers.place_of(tensor), (None, None))
        return slots if numbers is not None and numbers.are(tensor) else None

    def forget(self) -> None:
        """Let go of every note."""
        self._notes.clear()


PEAKS = Peaks()
"""Those of this process."""


def peak_scale(slots: Tensor, largest: float, *, power_of_two: bool = False, backend: str = "auto") -> Tensor:
    """The factor that takes a tensor's peak to the largest value of an FP8 format, as transformer-engine finds it.

    Args:
        slots: fp32 [SLOTS], or any number of them; the peak is the largest.
        largest: finite value of the format, `torch.finfo(dtype).max`.
        power_of_two: the power of two at or below the factor instead.
        backend: auto (Triton on CUDA, else torch), torch or triton.

    Returns:
        fp32 [1]: largest / peak rounded to nearest; 1 where the peak is 0 or not finite, and the largest fp32 number where the
        quotient would be infinite.
    """
    if slots.dtype != torch.float32:
        raise TypeError(f"slots: expected fp32, got {slots.dtype}")
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "triton" or (backend == "auto" and slots.is_cuda):
        from k3kernels.triton_peaks import peak_scale_triton  # imports triton, which CPU users may lack

        return peak_scale_triton(slots.contiguous(), largest, power_of_two)
    peak = slots.max().view(1)
    scale = torch.full_like(peak, largest) / peak  # a number / tensor would be number * (1 / tensor), rounded twice
    scale = scale.clamp_max(torch.finfo(torch.float32).max)
    if power_of_two:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where((peak > 0) & (peak < float("inf")), scale, 1.0)
