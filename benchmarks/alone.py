"""One rank of a layout by itself: `torch.distributed` whose collectives give a rank what it sent.

    python benchmarks/step.py --alone 1/2 --no-split --arms context2_graphs_none

What is computed and captured is what that rank would compute and capture, at full size, with the other ranks' tensors
replaced by its own: numbers mean nothing, shapes, memory and time do. The time is that of a layout whose exchanges cost
nothing but a copy: what is left of a goal that the network may still take. Not for pipelines, whose stages wait for one another.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

NAME = "alone"


def done(value: Any) -> dist.Work:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return torch._C._distributed_c10d._create_work_from_future(future)


class Alone(dist.ProcessGroup):
    """A group whose other members hold what this one holds."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.place, self.members = rank, size

    def size(self) -> int:
        return self.members

    def rank(self) -> int:
        return self.place

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return self._named

    def _set_group_name(self, name: str) -> None:
        self._named = name

    def allreduce(self, tensors: list[torch.Tensor], _options: Any = None) -> dist.Work:
        return done(tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], _options: Any = None) -> dist.Work:
        return done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], _options: Any = None) -> dist.Work:
        return done(tensors)

    def barrier(self, _options: Any = None) -> dist.Work:
        return done(None)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], _options: Any = None
    ) -> dist.Work:
        for parts, own in zip(outputs, inputs):
            for part in parts:
                part.copy_(own)
        return done(outputs)

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, _options: Any = None) -> dist.Work:
        if output.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
            output.view(self.members, -1).copy_(own.reshape(1, -1))
        # else a buffer gathers itself in place: the others' parts are as they were
        return done(output)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], _options: Any = None
    ) -> dist.Work:
        for output, own in zip(outputs, inputs):
            self._allgather_base(output, own)
        return done(outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, _options: Any = None) -> dist.Work:
        output.copy_(whole.view(self.members, *output.shape)[self.place])
        return done(output)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], _options: Any = None
    ) -> dist.Work:
        for output, whole in zip(outputs, inputs):
            self._reduce_scatter_base(output, whole)
        return done(outputs)

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, _outs: list[int], _ins: list[int], _options: Any = None
    ) -> dist.Work:
        rows = min(output.shape[0], given.shape[0])
        output[:rows].copy_(given[:rows])
        output[rows:].zero_()
        return done(output)


def install(place: str) -> None:
    """`place` is RANK/WORLD. From here on every group that torch.distributed makes is of this kind."""
    rank, _, world = place.partition("/")
    if not (rank.isdigit() and world.isdigit() and int(rank) < int(world)):
        raise SystemExit(f"--alone {place}: expected RANK/WORLD with RANK below WORLD, as in --alone 1/2")
    os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK="0", LOCAL_WORLD_SIZE=world)
    dist.Backend.register_backend(NAME, lambda _store, own, size, _timeout: Alone(own, size), devices=["cpu", "cuda"])
    begin, group = dist.init_process_group, dist.new_group

    def init_process_group(_backend: str | None = None, **_given: Any) -> None:
        begin(NAME, store=dist.HashStore(), rank=int(rank), world_size=int(world))

    def new_group(ranks: list[int] | None = None, *_given: Any, **_more: Any) -> Any:
        return group(ranks, backend=NAME)

    from k3train import launch

    launch._rendezvous = lambda _place: dist.HashStore()  # nobody else comes
    dist.init_process_group, dist.new_group = init_process_group, new_group  # type: ignore[assignment]
    dist.distributed_c10d.new_group = new_group  # type: ignore[assignment]

    def all_gather_object(objects: list[Any], own: Any, group: Any = None) -> None:
        objects[:] = [own] * len(objects)

    dist.all_gather_object = all_gather_object  # type: ignore[assignment]
    dist.broadcast_object_list = lambda *_given, **_more: None  # type: ignore[assignment]
