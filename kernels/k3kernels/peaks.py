"""The largest magnitude of a tensor, found by the kernel that writes it, for whoever rounds it to FP8 next.

Rounding with one scale for a whole tensor reads it twice: once for its peak, once to round. A kernel that has the values
in registers finds the peak on its way, so the first reading falls away. Whether a peak is wanted is one switch of the process
(`PEAKS.wanted`), and kernels are compiled without it where it is off.

A note is a promise about memory: `note` keeps the tensor, so that nothing else can lie where it did, and `take` finds it by
address, through any views of the whole that autograd makes in between. A tensor written in place since is not found.
"""

from __future__ import annotations

from collections import deque

import torch

SLOTS = 32
"""Numbers a peak is spread over: programs of a kernel meet at different ones. The peak is the largest of them."""

HELD = 8
"""Notes that nobody has taken yet; of more, the oldest are forgotten, and with them their tensors let go."""


class Peaks:
    """Peaks of tensors that kernels have written and nobody has rounded yet."""

    def __init__(self) -> None:
        self.wanted = False
        self._notes: deque[tuple[torch.Tensor, int, torch.Tensor]] = deque(maxlen=HELD)

    def slots(self, device: torch.device) -> torch.Tensor | None:
        """Zeros fp32 [SLOTS] for a kernel to raise, or None where no peak is wanted."""
        return torch.zeros(SLOTS, dtype=torch.float32, device=device) if self.wanted else None

    def note(self, tensor: torch.Tensor, slots: torch.Tensor | None) -> None:
        """slots: at least the magnitude of every element of `tensor` as it is stored, and one of them equal to the largest."""
        if slots is not None:
            self._notes.append((tensor.detach(), tensor._version, slots))

    def take(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The slots noted for these very numbers, once; None where nobody noted them."""
        for i, (noted, version, slots) in enumerate(self._notes):
            if (
                noted.data_ptr() == tensor.data_ptr()
                and noted.numel() == tensor.numel()
                and noted.dtype == tensor.dtype
            ):
                del self._notes[i]
                return slots if noted._version == version and noted.is_contiguous() and tensor.is_contiguous() else None
        return None

    def forget(self) -> None:
        """Let go of every tensor."""
        self._notes.clear()


PEAKS = Peaks()
"""Those of this process."""
