"""One kernel launch, and a shorter way to repeat one."""

from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

# Repeated launches skip Triton's binding of arguments (30 of them, looked at one by one), by the launcher of Triton 3.6;
# another version takes the long way.
DIRECT = triton.__version__.startswith("3.6.")
MOST = 2000  # kinds of launches remembered; past that all are forgotten, and each takes the long way once more
_seen: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def _kind(x: Any) -> Any:
    """Everything about an argument that Triton compiles for.  Of integers it is less than their value, never more; the class
    tells 1 from 1.0 and True, which are equal as keys."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16
    if x is None:
        return None
    if isinstance(x, (int, float)):
        return x.__class__, x
    return x.base.dtype, *x.block_shape  # a tensor descriptor; its layout follows from these


def _watched(kernel: Any) -> bool:
    """Whether somebody (a profiler) wants to be called with every launch, which only the long way does."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(kernel.pre_run_hooks) or any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def _direct(kernel: Any, programs: int, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    device = driver.active.get_current_device()
    # A compiled kernel keeps its function alive, so that its id stays its own.
    key = (id(kernel), device, *map(_kind, args), *meta.items())
    found = _seen.get(key)
    if found is None:
        compiled = kernel[(programs,)](*args, **meta)
        if compiled is None or hasattr(compiled, "result"):  # forbidden by a hook, or still being compiled elsewhere
            return
        if len(_seen) >= MOST:
            _seen.clear()
        _seen[key] = compiled, tuple(meta[p.name] for p in kernel.params[len(args) :])
        return
    compiled, constants = found
    stream = driver.active.get_current_stream(device)
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    run(programs, 1, 1, stream, function, packed, None, None, None, *args, *constants)


def launch(kernel: Any, programs: int, *args: Any, **meta: Any) -> None:
    """One launch; nothing to do for an empty grid.  args in the kernel's order, its constants and options in meta."""
    if programs <= 0:
        return
    if DIRECT and hasattr(kernel, "params") and not _watched(kernel):  # the interpreter's kernels have no params
        _direct(kernel, programs, args, meta)
    else:
        kernel[(programs,)](*args, **meta)
