"""The adapter that lets megatron-core run without a GPU, over gloo.

megatron-core asks for the device in ways that no argument reaches: `torch.cuda.current_device()` as the device of a
tensor, `device="cuda"` literals in the schedules, `Tensor.type()` compared with `"torch.cuda.FloatTensor"`, NCCL
reductions that gloo lacks. `install()` answers each of them with the CPU's equivalent, so that the code that trains on
a laptop is the code that trains on a cluster.

Call it once, before anything of megatron is imported (`megatron.core.tensor_parallel.random` binds
`torch.cuda._lazy_call` when it is imported). On a machine with a usable GPU it does nothing.

Two kinds of replacement:
  * functions of `torch.cuda` that cannot work without a GPU at all are replaced for every caller;
  * names that mean something on a CPU machine too (tensor factories, `Tensor.type`, `torch.cuda.device_count`, ...)
    behave differently only when the caller is megatron, so other libraries see the torch they know.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device

from k3train.errors import EnvironmentError_

CPU = torch.device("cpu")

# Packages whose calls mean "the GPU" and get the CPU.
GUESTS = ("megatron.", "emerging_optimizers.")

# Factories that megatron calls with `device="cuda"` or `pin_memory=True`.
FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones",
    "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like",
)  # fmt: skip

# Every `torch.cuda` attribute that `install` replaces, for the test that reads the pinned megatron-core.
COVERED: set[str] = set()

_installed = False


class Stream:
    """A stream on which everything has already happened."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event if event is not None else Event()

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class Event:
    """An event that is always complete; the time between two of them is 0 ms."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Done:
    """The handle of a collective that was completed before it was returned."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Averaged:
    """The handle of a SUM that becomes a mean when it is waited for."""

    def __init__(self, work: Any, tensor: torch.Tensor, count: int) -> None:
        self._work, self._tensor, self._count = work, tensor, count

    def wait(self, timeout: Any = None) -> bool:
        done = self._work.wait() if timeout is None else self._work.wait(timeout)
        if self._count:
            _divide(self._tensor, self._count)
            self._count = 0
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()


def installed() -> bool:
    """True when `install` has adapted this process to a machine without a GPU."""
    return _installed


def install() -> bool:
    """Adapt this process to a machine without a GPU, once; later calls do nothing.

    Returns True when the adapter is in place, False on a machine with a GPU, where nothing is touched.
    Raises EnvironmentError_ when megatron was imported first: it has then bound functions that need a GPU.
    """
    global _installed
    if _installed:
        return True
    if torch.cuda.is_available():
        return False
    if "megatron.core" in sys.modules:
        raise EnvironmentError_(
            "k3train.platform.install() came after megatron.core was imported, and this machine has no usable GPU: "
            "megatron has already bound torch.cuda functions that cannot work here. Call k3train.platform.install() "
            "(or import k3train's own modules) before the first `import megatron.core`."
        )
    # `with torch.device("meta")` recognises factories by identity, in a set made on first use: make it now, of the
    # originals, which the wrappers below call.
    torch.utils._device._device_constructors()
    # torch.compile on a CPU means minutes of g++ for megatron's small fused functions. TORCHDYNAMO_DISABLE=0 keeps it.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if (dynamo := sys.modules.get("torch._dynamo.config")) is not None and os.environ["TORCHDYNAMO_DISABLE"] == "1":
        setattr(dynamo, "disable", True)  # noqa: B010
    _replace_cuda()
    _replace_tensor_functions()
    _replace_collectives()
    quieten()
    _installed = True
    return True


def _called_by_guest() -> bool:
    """True when the function that called the wrapper that calls this belongs to megatron."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(GUESTS)


def _replace_cuda() -> None:
    """Give `torch.cuda` the meanings it has on a machine whose only device is the CPU."""
    stream = Stream()
    true_device_count = torch.cuda.device_count

    def device_count() -> int:
        return 1 if _called_by_guest() else true_device_count()

    replacements: dict[str, Any] = {
        # The answer is used as a tensor's `device` and as a key of `default_generators`.
        "current_device": lambda: CPU,
        "default_generators": {CPU: torch.default_generator},
        "device_count": device_count,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "set_stream": lambda stream: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        # Not torch.manual_seed: that seeds torch.cuda in turn, and so would never return.
        "manual_seed": torch.default_generator.manual_seed,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: defaultdict(int),
        "is_current_stream_capturing": lambda: False,
        "_lazy_call": lambda callback, **options: callback(),
        "_lazy_init": lambda: None,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
        COVERED.add(name)
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(torch.cuda.random, name, replacements[name])
        COVERED.add(f"random.{name}")
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *args: 0)
        COVERED.add(f"nvtx.{name}")


def _factory(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def on_cpu(*args: Any, **options: Any) -> torch.Tensor:
        device, pinned = options.get("device"), options.get("pin_memory")
        if (pinned or (device is not None and device != CPU)) and _called_by_guest():
            if device is not None and torch.device(device).type == "cuda":
                options["device"] = CPU
            if pinned:  # page-locked memory only exists beside a GPU
                options["pin_memory"] = False
        return function(*args, **options)

    return on_cpu


def _replace_tensor_functions() -> None:
    """Send megatron's tensors to the CPU wherever it names the GPU."""
    for name in FACTORIES:
        setattr(torch, name, _factory(getattr(torch, name)))

    tensor, module = torch.Tensor, torch.nn.Module
    true_type, true_pin = tensor.type, tensor.pin_memory
    true_cuda, true_module_cuda = tensor.cuda, module.cuda

    @functools.wraps(true_type)
    def type_(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        name = true_type(self, *args, **options)
        # The optimizers sort parameters by comparing this string with 'torch.cuda.FloatTensor' and the like.
        if isinstance(name, str) and not name.startswith("torch.cuda.") and _called_by_guest():
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    @functools.wraps(true_cuda)
    def cuda(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return self if _called_by_guest() else true_cuda(self, *args, **options)

    @functools.wraps(true_module_cuda)
    def module_cuda(self: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
        return self if _called_by_guest() else true_module_cuda(self, *args, **options)

    @functools.wraps(true_pin)
    def pin_memory(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return self if _called_by_guest() else true_pin(self, *args, **options)

    for name, replacement in {"type": type_, "cuda": cuda, "pin_memory": pin_memory}.items():
        setattr(tensor, name, replacement)
    setattr(tensor, "record_stream", lambda self, stream: None)  # noqa: B010 (mypy takes no assignment to a method)
    setattr(module, "cuda", module_cuda)  # noqa: B010


def _divide(tensor: torch.Tensor, count: int) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(count)
    else:
        tensor.div_(count, rounding_mode="trunc")


def _list(sizes: Any) -> Any:
    return sizes.tolist() if torch.is_tensor(sizes) else sizes


def _coalescing(group: Any) -> bool:
    """True inside torch's coalescing manager, where a collective is only noted down and runs later."""
    c10d = dist.distributed_c10d
    return (group or c10d._get_default_group()) in c10d._world.pg_coalesce_state


def _replace_collectives() -> None:
    """Add to `torch.distributed` what gloo lacks: means, split sizes given as tensors, gathers of uneven tensors."""
    average, total = dist.ReduceOp.AVG, dist.ReduceOp.SUM
    true_all_reduce, true_all_to_all, true_all_gather = dist.all_reduce, dist.all_to_all_single, dist.all_gather
    true_reduce_scatter = dist.reduce_scatter_tensor

    @functools.wraps(true_all_reduce)
    def all_reduce(tensor: torch.Tensor, op: Any = total, group: Any = None, async_op: bool = False) -> Any:
        if op != average or dist.get_backend(group) != "gloo":
            return true_all_reduce(tensor, op, group, async_op)
        count = dist.get_world_size(group)
        if _coalescing(group):
            _divide(tensor, count)
            return true_all_reduce(tensor, total, group, async_op)
        work = true_all_reduce(tensor, total, group, async_op)
        if async_op and work is not None:
            return _Averaged(work, tensor, count)
        _divide(tensor, count)
        return work

    @functools.wraps(true_reduce_scatter)
    def reduce_scatter_tensor(
        output: torch.Tensor, input: torch.Tensor, op: Any = total, group: Any = None, async_op: bool = False
    ) -> Any:
        if op != average or dist.get_backend(group) != "gloo":
            return true_reduce_scatter(output, input, op, group, async_op)
        count = dist.get_world_size(group)
        if _coalescing(group):
            _divide(input, count)  # megatron's input is the gradient buffer, whose own shard is the output
            return true_reduce_scatter(output, input, total, group, async_op)
        work = true_reduce_scatter(output, input, total, group, async_op)
        if async_op and work is not None:
            return _Averaged(work, output, count)
        _divide(output, count)
        return work

    @functools.wraps(true_all_to_all)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        # The expert dispatcher brings its split sizes to the host only when they are on a GPU.
        return true_all_to_all(output, input, _list(output_split_sizes), _list(input_split_sizes), group, async_op)

    @functools.wraps(true_all_gather)
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        even = all(piece.shape == tensor_list[0].shape for piece in tensor_list)
        if even or dist.get_backend(group) != "gloo":
            return true_all_gather(tensor_list, tensor, group, async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for source, piece in enumerate(tensor_list):
            dist.broadcast(piece, group=group, group_src=source)
        return _Done() if async_op else None

    for function in (all_reduce, reduce_scatter_tensor, all_to_all_single, all_gather):
        setattr(dist, function.__name__, function)


# What megatron-core says at import and set-up on any machine without transformer-engine, and that nobody can act on.
NOISE = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "MimoModelConfig is experimental",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "Could not determine rank from torch.distributed",
    "torch.distributed is disabled, unavailable or uninitialized",  # reading a checkpoint's small state, rank by rank
    "The argument order of load has been changed",
)


def quieten() -> None:
    """Silence what megatron says about a machine that is as it should be. `install` calls it on a CPU."""
    # The tracker of GPU random states forks the CPU's generator here, and warns each time that it moved.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    # "full_param_layout not provided": megatron lays the buffers out by itself, which is what is wanted
    logging.getLogger("megatron.core.distributed.distributed_data_parallel").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
