"""What the ranks run when the pool itself is tested."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def add_ranks(offset: int) -> tuple[int, int]:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("wrong on purpose")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(9)
    dist.barrier()


def hang() -> None:
    while True:
        time.sleep(0.1)
