"""Finds operations that would make the host wait for a GPU, in code that runs on a CPU.

On a CPU nothing waits, but what would is known by name: reading a value, operations whose result has a size that only the
device knows, building a tensor on the device from Python's numbers (a copy from memory that is not pinned), and
`torch.cuda.synchronize`. The CPU kernels of k3kernels are left out, for a GPU does not run them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.repeat_interleave.Tensor, aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default,
    aten.bincount.default,
}  # fmt: skip
# not aten.index_put: it is how aten.index walks back, and that is judged where it is called
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}


def place() -> str | None:
    """file:function of the innermost frame of the project or of megatron; None where a kernel of k3kernels is."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path != __file__:
            if "k3kernels" in path:
                return None
            if f"{ROOT}/k3train/" in path or "/megatron/" in path:
                name = path.removeprefix(f"{ROOT}/").rpartition("site-packages/")[2]
                return f"{name}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


class _Operations(TorchDispatchMode):
    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func in INDEXED and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        by_mask = by_mask and not (func is not aten.index.Tensor and args[2].numel() == 1)  # fills under the mask
        sized = func is aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is not None
        if by_mask or (func in READS and not sized):
            self.note()
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads() -> Iterator[Counter[str]]:
    """What the code inside would wait for, by the place that asks."""
    seen: Counter[str] = Counter()

    def note() -> None:
        where = place()
        if where is not None:
            seen[where] += 1

    def noting(real: Any, when: Callable[[dict[str, Any]], bool] = lambda options: True) -> Any:
        def wrapper(*args: Any, **options: Any) -> Any:
            if when(options):
                note()
            return real(*args, **options)

        return wrapper

    def on_device(options: dict[str, Any]) -> bool:
        return options.get("device") is not None

    with (
        patch.object(torch.Tensor, "tolist", noting(torch.Tensor.tolist)),
        patch.object(torch.Tensor, "cpu", noting(torch.Tensor.cpu)),
        patch.object(torch.Tensor, "numpy", noting(torch.Tensor.numpy)),
        patch.object(torch.cuda, "synchronize", noting(torch.cuda.synchronize)),
        patch.object(torch, "tensor", noting(torch.tensor, on_device)),
        patch.object(torch, "as_tensor", noting(torch.as_tensor, on_device)),
        _Operations(note),
    ):
        yield seen
