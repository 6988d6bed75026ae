"""Where copies of tokens lie while they travel between ranks that share the experts.

A rank sends sorted copies, so what arrives is one run of rows a sending rank, each sorted by expert. Every sent row
carries a key, `sender * (local + 1) + expert` with the receiver's own number of the expert, or `local` for a row that
holds nothing: keys never fall from one arrived row to the next, and the rows of each (sender, expert) are found by
looking for where a key ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.routing.ops import Permutation, pick_backend


def send_keys(order: Permutation, experts: Tensor, ranks: int, sender: int) -> Tensor:
    """Keys fp32 [T * k] of the rows of `order`, which sorts experts int64 [T, k]; nothing is padded."""
    local = order.counts.numel() // ranks
    return (experts.reshape(-1)[order.source] % local + sender * (local + 1)).float()


def make_slots(
    order: Permutation, experts: Tensor, ranks: int, sender: int, room: int, fullest: Tensor | None = None, *,
    backend: str = "auto",
) -> tuple[Permutation, Tensor]:  # fmt: skip
    """Lay the copies out in `ranks` runs of `room` rows, one a receiving rank: sizes that no route changes.

    Args:
        order: sorts experts int64 [T, k]; rank r holds experts r * E / ranks and on.
        sender: this rank's place among `ranks`.
        room: rows of a run. Copies that no longer fit are not sent, and read another's row when they come back.
        fullest: int32 [1] or None; raised in place to the most rows that a run would have needed.

    Returns:
        the order of the ranks * room rows (source of a row without a copy: any; counts: copies sent to each rank), and
        keys fp32 [ranks * room].

    Raises:
        ValueError: the experts do not divide by `ranks`, or `room` is not above 0.
    """
    count = order.counts.numel()
    if ranks < 1 or count % ranks:
        raise ValueError(f"ranks: {count} experts do not divide by {ranks}")
    if room < 1:
        raise ValueError(f"room: must be above 0, got {room}")
    wanted = order.counts.view(ranks, -1).sum(1)
    starts = wanted.cumsum(0) - wanted
    if pick_backend(backend, order.source, count) == "triton":
        from k3kernels.routing import triton_travel

        source, place, keys = triton_travel.slots(order, experts, starts, wanted, sender, room)
    else:
        source, place, keys = _slots(order, experts, starts, wanted, sender, room)
    if fullest is not None:
        torch.maximum(fullest, wanted.max().to(torch.int32), out=fullest)
    return Permutation(source, place, wanted.clamp(max=room), order.top_k), keys


def _slots(
    order: Permutation, experts: Tensor, starts: Tensor, wanted: Tensor, sender: int, room: int
) -> tuple[Tensor, Tensor, Tensor]:
    ranks, local, flat = wanted.numel(), order.counts.numel() // wanted.numel(), experts.reshape(-1)
    within = torch.arange(room, device=flat.device)
    row = (starts[:, None] + within).clamp(max=flat.numel() - 1)
    source = order.source[row.reshape(-1)]
    held = (within < wanted[:, None]).reshape(-1)
    keys = torch.where(held, flat[source] % local, local) + sender * (local + 1)
    rank = flat // local
    place = rank * room + (order.place - starts[rank]).clamp(max=room - 1)
    assert source.numel() == ranks * room
    return source, place.to(torch.int32), keys.float()


def make_arrival(keys: Tensor, ranks: int, local: int, *, backend: str = "auto") -> Permutation:
    """The order by expert, and by sender within one, of arrived rows with these keys fp32 [rows], never falling.

    Rows that hold nothing come last. counts int64 [local].
    """
    groups = torch.arange(ranks * (local + 1), device=keys.device, dtype=keys.dtype)
    ends = torch.searchsorted(keys, groups, right=True, out_int32=True)
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    sizes = (ends - begins).view(ranks, local + 1).T.contiguous()  # [local + 1, ranks], in the order of arrival's end
    first = (sizes.view(-1).cumsum(0, dtype=torch.int32) - sizes.view(-1)).view(local + 1, ranks)
    shift = first.T.reshape(-1) - begins
    if pick_backend(backend, keys, local) == "triton":
        from k3kernels.routing import triton_travel

        source, place = triton_travel.arrival(keys, shift)
    else:
        rows = torch.arange(keys.numel(), dtype=torch.int32, device=keys.device)
        place = rows + shift[keys.long()]
        source = torch.empty_like(rows).scatter_(0, place.long(), rows)
    return Permutation(source, place, sizes[:local].sum(1), 1)
