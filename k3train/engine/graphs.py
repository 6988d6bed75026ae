"""Forward and backward of a micro-batch as one captured CUDA graph (`train.cuda_graphs=step`).

A captured step costs the host one launch a micro-batch instead of thousands, so the GPU never waits for Python. Shapes
are fixed by the stream's length; the number of documents is rounded up to a power of two by empty documents at the end,
and each rounded number has a graph of its own. All graphs share one memory pool: one runs at a time.

Parameters, gradients, routing counts and biases are the same tensors in every step; what changes (tokens, labels, mask,
boundaries) is copied into fixed buffers. Only one rank a model is captured: collectives between ranks stay outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from k3train.engine.base import Batch
from k3train.errors import EnvironmentError_

SMALLEST = 8
"""Documents that the smallest graph has room for."""


def pad_documents(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Boundaries int32 [N + 1] with empty documents at the end, so that N is a power of two of at least SMALLEST."""
    documents = cu_seqlens.numel() - 1
    room = max(SMALLEST, 1 << (documents - 1).bit_length())
    padding = cu_seqlens[-1:].expand(room - documents)
    return torch.cat([cu_seqlens, padding])


class StepGraphs:
    """Runs micro-batches: each new shape once eagerly (kernels are compiled, buffers made), then captured, then
    replayed. `run` does forward and backward of a batch on the device and adds what it wants kept to its own tensors.

    Everything of the engine happens on `stream`, the stream that captures: a gradient is accumulated on the stream that
    its parameter's accumulator was made on.
    """

    def __init__(self, run: Callable[[Batch], None], stream: torch.cuda.Stream) -> None:
        self.run, self.stream = run, stream
        self.pool = torch.cuda.MemPool()
        self.graphs: dict[tuple[object, ...], tuple[Batch, torch.cuda.CUDAGraph]] = {}
        self.warm: set[tuple[object, ...]] = set()
        self.off = False

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Nothing is captured or replayed while inside."""
        before, self.off = self.off, True
        try:
            yield
        finally:
            self.off = before

    def micro_batch(self, batch: Batch) -> None:
        """Forward and backward of one batch of host or device tensors."""
        batch = {**batch, "cu_seqlens": pad_documents(batch["cu_seqlens"])}
        key = tuple((name, tensor.shape) for name, tensor in sorted(batch.items()))
        if self.off:
            self._eager(batch)
        elif key in self.graphs:
            self._replay(key, batch)
        elif key in self.warm:
            self._capture(key, batch)
            self._replay(key, batch)
        else:
            self._eager(batch)
            self.warm.add(key)

    def _eager(self, batch: Batch) -> None:
        held = to_device(batch, self.stream.device)
        if self.graphs:  # the activations of an eager micro-batch fit where those of the graphs lie
            with torch.cuda.use_mem_pool(self.pool):
                self.run(held)
        else:
            self.run(held)

    def _replay(self, key: tuple[object, ...], batch: Batch) -> None:
        static, graph = self.graphs[key]
        for name, tensor in static.items():
            source = batch[name] if batch[name].is_cuda else batch[name].pin_memory()
            tensor.copy_(source, non_blocking=True)
        graph.replay()

    def _capture(self, key: tuple[object, ...], batch: Batch) -> None:
        """Raises EnvironmentError_ where something in the step cannot be captured."""
        static = {name: tensor.to(self.stream.device) for name, tensor in batch.items()}
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool.id, stream=self.stream, capture_error_mode="thread_local"):
                self.run(static)
        except RuntimeError as error:
            raise EnvironmentError_(
                f"train.cuda_graphs=step cannot capture this configuration ({str(error).splitlines()[0]}); type "
                "train.cuda_graphs=none"
            ) from error
        self.graphs[key] = (static, graph)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device, copied without making the host wait."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {
        name: tensor if tensor.is_cuda else tensor.pin_memory().to(device, non_blocking=True)
        for name, tensor in batch.items()
    }
