"""Kernels of `travel`: one row or copy a lane, no races, no size asked for on the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.routing.ops import Permutation

BLOCK = 512  # rows of a program


@triton.jit
def slots_kernel(
    source_ptr, experts_ptr, starts_ptr, wanted_ptr, out_ptr, keys_ptr, COPIES, ROWS, ROOM, LOCAL, SENDER,
    B: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(ROWS / B),): the copy and the key of each row."""
    row = tl.program_id(0) * B + tl.arange(0, B)
    live = row < ROWS
    rank, within = row // ROOM, row % ROOM
    start = tl.load(starts_ptr + rank, mask=live, other=0).to(tl.int32)
    held = live & (within < tl.load(wanted_ptr + rank, mask=live, other=0).to(tl.int32))
    copy = tl.load(source_ptr + tl.minimum(start + within, COPIES - 1), mask=live, other=0)
    expert = tl.load(experts_ptr + copy, mask=held, other=0).to(tl.int32) % LOCAL
    key = SENDER * (LOCAL + 1) + tl.where(held, expert, LOCAL)
    tl.store(out_ptr + row, copy, mask=live)
    tl.store(keys_ptr + row, key.to(tl.float32), mask=live)


@triton.jit
def slot_of_copy_kernel(
    place_ptr, experts_ptr, starts_ptr, out_ptr, COPIES, ROOM, LOCAL, B: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(COPIES / B),): the row of each copy."""
    copy = tl.program_id(0) * B + tl.arange(0, B)
    live = copy < COPIES
    rank = tl.load(experts_ptr + copy, mask=live, other=0).to(tl.int32) // LOCAL
    within = tl.load(place_ptr + copy, mask=live, other=0) - tl.load(starts_ptr + rank, mask=live, other=0).to(tl.int32)
    tl.store(out_ptr + copy, rank * ROOM + tl.minimum(within, ROOM - 1), mask=live)


@triton.jit
def arrival_kernel(keys_ptr, shift_ptr, source_ptr, place_ptr, ROWS, B: tl.constexpr):
    """Grid (ceil(ROWS / B),): where each arrived row goes, and the other way round."""
    row = tl.program_id(0) * B + tl.arange(0, B)
    live = row < ROWS
    key = tl.load(keys_ptr + row, mask=live, other=0.0).to(tl.int32)
    there = row + tl.load(shift_ptr + key, mask=live, other=0)
    tl.store(place_ptr + row, there, mask=live)
    tl.store(source_ptr + there, row, mask=live)


def slots(
    order: Permutation, experts: Tensor, starts: Tensor, wanted: Tensor, sender: int, room: int
) -> tuple[Tensor, Tensor, Tensor]:
    """source int32 [ranks * room], place int32 [T * k], keys fp32 [ranks * room]."""
    flat, ranks = experts.contiguous().view(-1), wanted.numel()
    copies, rows, local = flat.numel(), ranks * room, order.counts.numel() // ranks
    source = torch.empty(rows, dtype=torch.int32, device=flat.device)
    keys = torch.empty(rows, dtype=torch.float32, device=flat.device)
    place = torch.empty_like(order.place)
    slots_kernel[(triton.cdiv(rows, BLOCK),)](
        order.source, flat, starts, wanted, source, keys, copies, rows, room, local, sender, B=BLOCK, num_warps=4
    )
    slot_of_copy_kernel[(triton.cdiv(copies, BLOCK),)](
        order.place, flat, starts, place, copies, room, local, B=BLOCK, num_warps=4
    )
    return source, place, keys


def arrival(keys: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """source and place int32 [rows]."""
    rows = keys.numel()
    source = torch.empty(rows, dtype=torch.int32, device=keys.device)
    place = torch.empty_like(source)
    if rows:
        arrival_kernel[(triton.cdiv(rows, BLOCK),)](keys, shift, source, place, rows, B=BLOCK, num_warps=4)
    return source, place
