"""Forward and backward as captured CUDA graphs (`train.cuda_graphs=step`).

A captured step costs the host one launch instead of thousands, so the GPU never waits for Python. What one graph holds
is the engine's choice: a micro-batch, where ranks meet at the end of a step only; or the whole schedule of a step with
all of its micro-batches, transfers between pipeline stages and reductions (`whole_schedule`).

Shapes are fixed by the stream's length; the number of documents is rounded up to a power of two by empty documents at the
end, and each rounded number has a graph of its own, under context parallelism for each of the few bounds on documents
(`parallel.slices.Spans`). All graphs share one memory pool: one runs at a time.

Parameters, gradients, routing counts and biases are the same tensors in every step; what changes (tokens, labels, mask,
boundaries) is copied into fixed buffers. Collectives inside a graph ask the same of every rank in every step: all of their
ranks replay, or all capture, or all launch them from Python, so the shapes of all must be the same (`agreed`).
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from k3train.config.schema import ParallelConfig
from k3train.engine.base import Batch
from k3train.errors import EnvironmentError_
from k3train.parallel.slices import Spans, rounded_up

SMALLEST = 8
"""Documents that the smallest graph has room for."""

MOST = 8
"""Graphs that are kept; the one unused for longest is dropped (a growing batch asks for a new one each time)."""

Run = Callable[[list[Batch]], None]


def whole_schedule(parallel: ParallelConfig) -> bool:
    """Whether one graph holds all micro-batches of a step: where ranks exchange something between micro-batches, or
    reduce gradients during the last one."""
    return parallel.pipeline > 1 or parallel.overlap_grad_reduce


def room_for(documents: int) -> int:
    """A power of two of at least SMALLEST."""
    return rounded_up(documents, SMALLEST)


def pad_documents(cu_seqlens: torch.Tensor, room: int | None = None) -> torch.Tensor:
    """Boundaries int32 [N + 1] with empty documents at the end, so that there are `room` (None: `room_for` N)."""
    documents = cu_seqlens.numel() - 1
    room = room_for(documents) if room is None else room
    padding = cu_seqlens[-1:].expand(room - documents)
    return torch.cat([cu_seqlens, padding])


def aligned(batches: Sequence[Batch]) -> list[Batch]:
    """The micro-batches with equal names and shapes: one room for documents, and `valid` in all of them or in none."""
    room = max(room_for(b["cu_seqlens"].numel() - 1) for b in batches)
    padding = any("valid" in b for b in batches)
    same = []
    for batch in batches:
        full = {**batch, "cu_seqlens": pad_documents(batch["cu_seqlens"], room)}
        if padding and "valid" not in full:
            full["valid"] = torch.ones_like(full["tokens"], dtype=torch.bool)
        same.append(full)
    return same


def agreed(batches: Sequence[Batch], spans: Spans | None, device: torch.device) -> tuple[list[Batch], Spans | None]:
    """`aligned`, with the same names and shapes and the same bounds on every rank of the run, which must all call it.

    Where ranks that see other documents meet inside a graph, each must replay, capture or launch what the others do: NCCL
    demands that an operation is captured on all of its ranks or on none. One small all-reduce, which the host waits for.
    """
    same = aligned(batches)
    room, padding = same[0]["cu_seqlens"].numel() - 1, "valid" in same[0]
    bounds = (0, 0) if spans is None else (spans.border, spans.longest)  # None on every rank or on none
    most = torch.tensor([room, padding, *bounds], dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    room, padding, *bounds = most.tolist()
    for batch in same:
        batch["cu_seqlens"] = pad_documents(batch["cu_seqlens"], room)
        if padding and "valid" not in batch:
            batch["valid"] = torch.ones_like(batch["tokens"], dtype=torch.bool)
    return same, None if spans is None else Spans(*bounds)


def apart(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Tensors [n] of one shape as the rows of [M, n] on a device, each row at a multiple of 16 bytes as a tensor of its own
    would be: Triton compiles another kernel for addresses that are not, and a capture is no time for that."""
    rows = torch.stack(list(tensors))
    unit = max(1, 16 // rows.element_size())
    room = torch.zeros(len(tensors), -(-rows.shape[1] // unit) * unit, dtype=rows.dtype, device=device)
    room[:, : rows.shape[1]] = rows.to(device)
    return room[:, : rows.shape[1]]


class Buffers:
    """Fixed tensors on a device that hold the micro-batches of a graph, one stacked tensor a name."""

    def __init__(self, batches: Sequence[Batch], device: torch.device) -> None:
        """batches: `aligned`."""
        self.stacked = {name: apart([b[name] for b in batches], device) for name in batches[0]}
        self.batches: list[Batch] = [
            {name: tensor[m] for name, tensor in self.stacked.items()} for m in range(len(batches))
        ]

    def fill(self, batches: Sequence[Batch]) -> None:
        """Copy micro-batches of the same shapes in, without making the host wait."""
        for name, tensor in self.stacked.items():
            source = torch.stack([b[name] for b in batches])
            if tensor.is_cuda and not source.is_cuda:
                source = source.pin_memory()
            tensor.copy_(source, non_blocking=True)


class Graph(Protocol):
    def replay(self) -> None: ...


class StepGraphs:
    """Runs micro-batches: each new shape once eagerly (kernels are compiled, buffers and communicators made), then
    captured, then replayed. `run` does forward and backward of batches on the device and adds what it wants kept to its
    own tensors.

    Everything of the engine happens on `stream`, the stream that captures: a gradient is accumulated on the stream that
    its parameter's accumulator was made on.
    """

    def __init__(self, run: Run, stream: torch.cuda.Stream) -> None:
        self.run, self.stream = run, stream
        self.pool = torch.cuda.MemPool()
        self.graphs: dict[tuple[object, ...], tuple[Buffers, Graph]] = {}
        self.warm: set[tuple[object, ...]] = set()
        self.off = False
        atexit.register(_close, weakref.ref(self))

    def close(self) -> None:
        """Drop the graphs. Communicators whose operations a graph holds wait for it before they go: call this before
        process groups are destroyed; a process that ends does."""
        self.graphs.clear()

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Nothing is captured or replayed while inside."""
        before, self.off = self.off, True
        try:
            yield
        finally:
            self.off = before

    def micro_batches(self, batches: Sequence[Batch], spans: Spans | None = None) -> None:
        """Forward and backward of the batches of one graph, host or device tensors. spans: what else its shapes follow."""
        batches = aligned(batches)
        key = (len(batches), spans, *((name, tensor.shape) for name, tensor in sorted(batches[0].items())))
        if self.off:
            self._eager(batches)
        elif key in self.graphs:
            self._replay(key, batches)
        elif key in self.warm:
            self._capture(key, batches)
            self._replay(key, batches)
        else:
            self._eager(batches)
            self.warm.add(key)

    def _eager(self, batches: list[Batch]) -> None:
        held = [to_device(batch, self.stream.device) for batch in batches]
        if self.graphs:  # the activations of an eager micro-batch fit where those of the graphs lie
            with torch.cuda.use_mem_pool(self.pool):
                self.run(held)
        else:
            self.run(held)

    def _replay(self, key: tuple[object, ...], batches: list[Batch]) -> None:
        static, graph = self.graphs[key] = self.graphs.pop(key)  # the last used is the last
        static.fill(batches)
        graph.replay()

    def _capture(self, key: tuple[object, ...], batches: list[Batch]) -> None:
        static = Buffers(batches, self.stream.device)
        graph = self._record(static)  # after it the device has nothing to do, so graphs may go
        while len(self.graphs) >= MOST:
            del self.graphs[next(iter(self.graphs))]
        self.graphs[key] = (static, graph)

    def _record(self, static: Buffers) -> Graph:
        """Raises EnvironmentError_ where something in the step cannot be captured."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool.id, stream=self.stream, capture_error_mode="thread_local"):
                self.run(static.batches)
        except RuntimeError as error:
            raise EnvironmentError_(
                f"train.cuda_graphs=step cannot capture this configuration ({str(error).splitlines()[0]}); type "
                "train.cuda_graphs=none"
            ) from error
        return graph


def _close(graphs: weakref.ref[StepGraphs]) -> None:
    there = graphs()
    if there is not None:
        there.close()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device, copied without making the host wait."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {
        name: tensor if tensor.is_cuda else tensor.pin_memory().to(device, non_blocking=True)
        for name, tensor in batch.items()
    }
