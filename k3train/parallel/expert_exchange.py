"""Rows on their way to the ranks that hold their experts, and back (`parallel.expert_exchange`).

    sized  exactly the rows that are routed: their numbers are read by the host, once a layer
    slots  the same number of rows to every rank, whatever the routes: `room` rows, of which the last may hold nothing.
           The host reads nothing, so that a captured graph can hold it. Where more rows were routed to a rank than
           there is room for, `fullest` tells after the step, and the step is done again with `sized` (the engine does).

Rows travel while the caller goes on: `depart` only starts an exchange, `arrive` waits for it, and in the backward the
same two change places. What runs between them in the forward has its backward between them too, since autograd goes
from the last made node to the first: there it hides the way of the gradients.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from k3kernels import routing
from k3kernels.routing import Permutation, travel

KINDS = ("megatron", "sized", "slots")


@dataclass
class ExchangePlan:
    """How a rank's layers exchange rows. capacity: room of a rank for another's rows, over the share of each if all had
    the same. overlap: shared experts are computed while rows travel.

    fullest: int32 [1] on the device, the most rows of a step that any layer wanted to send to one rank; room: how many
    it could, `share` if all ranks had the same, equal in all layers. exact: no slots for now, every row is sent.
    """

    kind: str = "megatron"
    capacity: float = 1.25
    overlap: bool = False
    fullest: torch.Tensor | None = None
    room: int = 0
    share: float = 1.0
    exact: bool = False

    def clear(self) -> None:
        """A step begins."""
        if self.fullest is not None:
            self.fullest.zero_()

    def overflowed(self) -> bool:
        """Whether rows were left out since `clear`, on this rank. Waits for the device."""
        return self.fullest is not None and self.room > 0 and int(self.fullest) > self.room

    def capacity_wanted(self) -> float:
        """The capacity that would have held every row since `clear`, on all ranks, and a warning that says so, once. All
        ranks of the run must call it."""
        assert self.fullest is not None
        dist.all_reduce(self.fullest, op=dist.ReduceOp.MAX)
        wanted = int(self.fullest) / self.share
        if dist.get_rank() == 0:
            warnings.warn(
                f"more tokens chose the experts of one rank than parallel.expert_capacity={self.capacity} has room for: "
                f"the step was done again without slots; parallel.expert_capacity={math.ceil(wanted * 20) / 20:.2f} "
                "would have held them",
                stacklevel=2,
            )
        return wanted

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Every row is sent while inside."""
        before, self.exact = self.exact, True
        try:
            yield
        finally:
            self.exact = before


def room_for(tokens: int, top_k: int, ranks: int, local: int, capacity: float) -> int:
    """Rows of a run: `capacity` times an equal share of tokens * top_k, and never more than could be routed there."""
    return min(math.ceil(capacity * tokens * top_k / ranks), tokens * min(top_k, local))


class _Trip:
    """One exchange of several tensors' rows: rows sent[r] of each go to rank r, which sends received[r] back; None: as
    many to each. Everything sent stays alive until it has been waited for."""

    def __init__(self, group: dist.ProcessGroup, sent: list[int] | None, received: list[int] | None) -> None:
        self.group, self.sent, self.received = group, sent, received
        self.pending: list[tuple[Any, torch.Tensor]] = []
        self.homeward: tuple[torch.Tensor, ...] = ()

    def start(self, x: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        x = x.contiguous()
        out = x.new_empty(x.shape[0] if received is None else sum(received), *x.shape[1:])
        work = dist.all_to_all_single(out, x, received, sent, group=self.group, async_op=True)
        self.pending.append((work, x))
        return out

    def wait(self) -> None:
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trip: _Trip, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.trip = trip
        return tuple(trip.start(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        trip = ctx.trip
        trip.wait()
        home, trip.homeward = trip.homeward, ()
        return (None, *home)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trip: _Trip, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.trip = trip
        trip.wait()
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.trip.homeward = tuple(ctx.trip.start(g, back=True) for g in grads)
        return (None, *grads)  # for their shapes alone: `_Depart` hands on what comes home


class Journey:
    """The rows of one layer: out with `depart`, there at `arrive`, home again with `send_back` and `home`."""

    def __init__(self, order: Permutation, out: _Trip, back: _Trip, ranks: int, local: int) -> None:
        self.order, self.out, self.back, self.ranks, self.local = order, out, back, ranks, local
        self.flying: tuple[torch.Tensor, ...] = ()

    def depart(self, x: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> None:
        rows, weights = routing.dispatch(x, weights, self.order)
        self.flying = _Depart.apply(self.out, rows, torch.stack([weights, keys.to(weights.dtype)], 1))

    def arrive(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """rows [N, D] sorted by this rank's experts, counts int64 [local] (rows after their sum hold nothing), weights
        fp32 [N]."""
        rows, labels = _Arrive.apply(self.out, *self.flying)
        self.arrival = travel.make_arrival(labels.detach()[:, 1].contiguous(), self.ranks, self.local)
        rows, weights = routing.dispatch(rows, labels[:, :1], self.arrival)
        self.flying = ()
        return rows, self.arrival.counts, weights

    def send_back(self, rows: torch.Tensor) -> None:
        self.flying = _Depart.apply(self.back, routing.combine(rows, self.arrival))

    def home(self) -> torch.Tensor:
        """[T, D]: the sum of each token's rows, in fp32 and the order of its places."""
        (rows,) = _Arrive.apply(self.back, *self.flying)
        self.flying = ()
        return routing.combine(rows, self.order)


class ExpertExchange:
    """The exchange of one layer's rows between the ranks of `group`, which hold `experts` in equal parts, in order."""

    def __init__(self, plan: ExchangePlan, group: dist.ProcessGroup, experts: int) -> None:
        self.plan, self.group, self.experts = plan, group, experts
        self.ranks, self.rank, self.local = group.size(), group.rank(), experts // group.size()

    def depart(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, *, exact: bool) -> Journey:
        """Send x [T, D] with weights [T, k] to experts int64 [T, k]; every rank has T tokens. exact: without slots."""
        order = routing.make_permutation(experts, self.experts)
        sent = received = None
        if exact or self.plan.exact or self.plan.kind == "sized":
            keys = travel.send_keys(order, experts, self.ranks, self.rank)
            sent, received = self._sizes(order.counts)
        else:
            tokens, top_k = experts.shape
            room = room_for(tokens, top_k, self.ranks, self.local, self.plan.capacity)
            self.plan.room, self.plan.share = room, tokens * top_k / self.ranks
            order, keys = travel.make_slots(order, experts, self.ranks, self.rank, room, self.plan.fullest)
        trips = (_Trip(self.group, sent, received), _Trip(self.group, received, sent))
        journey = Journey(order, *trips, self.ranks, self.local)
        journey.depart(x, weights, keys)
        return journey

    def _sizes(self, counts: torch.Tensor) -> tuple[list[int], list[int]]:
        """Rows to and from each rank. The host waits for the device here."""
        sent = counts.view(self.ranks, -1).sum(1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        table: list[list[int]] = torch.stack([sent, received]).tolist()
        return table[0], table[1]
