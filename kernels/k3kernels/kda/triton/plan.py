"""Which kernels and launch parameters a call uses.  Everything here is decided on the host from shapes alone."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .index import chunk_table


@dataclass(frozen=True)
class Config:
    """Tile sizes and warps of each kernel.  `hopper` selects the explicit-layout kernels (K = V = 128, bf16, sm_90);
    `block` is the middle-anchored block of the in-chunk products: 32, 16 or 8 tokens (32 or 8 with `hopper`)."""

    hopper: bool
    block: int
    prep_bd: int
    prep_warps: int
    state_bv: int
    state_warps: int
    kside_bd: int
    kside_warps: int


@lru_cache
def _device(index: int) -> tuple[bool, int]:
    p = torch.cuda.get_device_properties(index)
    return (p.major, p.minor) == (9, 0), p.multi_processor_count


def split_values(states: int, processors: int) -> bool:
    """Whether 64 value columns a program beat 128.  Both are bound by the latency of a chunk, and one program fits a
    multiprocessor: a round of 64 takes about 0.52 of a round of 128 (measured), so count rounds."""
    rounds = [-(-states * n // processors) for n in (1, 2)]
    return rounds[1] * 0.52 < rounds[0]


def split_stream(chunks: int, programs: int, processors: int) -> int:
    """Segments of a single long stream.  Cut in n, the passes take 3/n (forward) and 2/n (backward) of their time, so that
    fewer than 4 do not pay; a segment of fewer than 32 chunks would be start-up."""
    n = min(8, processors // programs, chunks // 32)
    return n if n >= 4 else 1


SLICES = 4  # of a long stream at most: 8 were no faster at 65,536 tokens of 32 heads


def slice_stream(chunks: int, programs: int, processors: int) -> int:
    """Slices of a long stream whose serial passes leave a third of the device or more idle (slices.py).  A slice of fewer
    than 256 chunks does not pay for its launches."""
    n = min(SLICES, chunks // 256)
    return n if n > 1 and 3 * programs <= 2 * processors else 1


def block_size(bound: float | None, low: bool) -> int:
    """Tokens of a middle-anchored block: the largest whose factors stay in range (common.py); low: bf16 operands."""
    if bound is None:
        return 8
    return 32 if low and bound >= -5.4 else 16


def choose(
    K: int, V: int, dtype: torch.dtype, bound: float | None, states: int, hopper: bool, processors: int
) -> Config:
    """The configuration of a call.  Pure: the device tests check the gradients of every value it can return."""
    low = dtype == torch.bfloat16
    bd = min(K, 32)
    if low and K == 128 and V == 128 and hopper:
        bv = 64 if split_values(states, processors) else 128
        return Config(True, 32 if block_size(bound, low) == 32 else 8, 16, 2, bv, bv // 16, bd, 2)
    bv = min(V, 64 if low and K <= 128 else 32)
    return Config(False, block_size(bound, low), min(K, 16), 2, bv, 4, bd, 2)


@dataclass
class Problem:
    """Everything about one call that is not a tensor of the caller."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    NT: int
    NC: int
    bound: float | None
    scale: float
    table: Tensor | None
    doc: Tensor | None
    dtype: torch.dtype
    config: Config
    segments: int
    slices: int

    @property
    def tiles(self) -> int:
        return self.NC * self.HV

    @property
    def meta(self) -> dict[str, Any]:
        low = self.dtype == torch.bfloat16
        return {
            "VARLEN": self.table is not None,
            "DT": tl.bfloat16 if low else tl.float32,
            "IP": "tf32" if low else "tf32x3",
        }

    @property
    def gate(self) -> dict[str, Any]:
        return {
            "GROUP": self.HV // self.H,
            "BS": self.config.block,
            "BOUNDED": self.bound is not None,
            "HT": tl.float16 if self.dtype == torch.bfloat16 else tl.float32,
        }


def plan(
    q: Tensor, v: Tensor, z: Tensor, bound: float | None, scale: float | None, cu_seqlens: Tensor | None
) -> Problem:
    """Shapes, chunk table and configuration of a call."""
    B, T, H, K = q.shape
    HV, V = v.shape[-2:]
    table = doc = None
    nt = (T + 63) // 64
    n, nc = B, B * nt
    if cu_seqlens is not None:
        n = cu_seqlens.numel() - 1
        table, doc, nc = chunk_table(cu_seqlens, T)
    hopper, processors = _device(q.device.index or 0) if q.is_cuda else (False, 1)
    c = choose(K, V, q.dtype, bound, n * HV, hopper and z.dtype == q.dtype, processors)
    scale = K**-0.5 if scale is None else scale
    single = B == 1 and cu_seqlens is None and K == V
    programs = HV * (V // c.state_bv)
    segments = split_stream(nt, programs, processors) if single else 1
    slices = slice_stream(nt, programs, processors) if B == 1 and cu_seqlens is None and segments == 1 else 1
    return Problem(B, T, H, HV, K, V, n, nt, nc, bound, scale, table, doc, q.dtype, c, segments, slices)
