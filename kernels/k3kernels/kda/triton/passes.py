"""The two serial passes over the chunks, whole or in segments.

A pass has one program per sequence, head and slice of value channels.  A long stream with few heads leaves most of the device
idle, so it is cut into segments that run side by side.  A segment moves the state by S_out = M S_in + h: its own pass from
S_in = 0 gives h, a pass with v = 0 from S_in = I gives M, a short fold gives every segment's start, and the real pass follows.
The adjoint needs no second M: dS_in = M^T dS_out + (the reverse pass from dS_out = 0).  The fold is in fp64.
"""

from typing import Any

import torch
from torch import Tensor

from .launch import launch
from .plan import Problem
from .reverse import reverse_kernel
from .state import state_kernel
from .state_hopper import panel, reverse_hopper_kernel, state_hopper_kernel

F32 = torch.float32


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, tokens and heads."""
    return x.stride(0), x.stride(1), x.stride(2)


def _panels(tiles: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Rows of all tiles of a kind, descriptors of [Q+, K+, Kb] and [A, M], Gam and the row scalars."""
    Qp, _, _, A, _, gam, row = tiles
    rows = Qp.shape[0] * 64
    return rows, panel(Qp, 3 * rows, 128, 64, 128), panel(A, 2 * rows, 64, 64, 64), gam, row


def _leaving(p: Problem, states: Tensor, values: Tensor, rows: int) -> tuple[Any, Any]:
    """Descriptors of a program's slices of [V, K] tiles and of [64, V] tiles."""
    bv = p.config.state_bv
    return panel(states, p.V * rows // 64, p.K, bv, p.K), panel(values, rows, p.V, 64, bv)


def _states(p: Problem, n: int, device: torch.device) -> Tensor:
    return torch.empty(n, p.HV, p.K, p.V, dtype=F32, device=device)


def state_whole(
    p: Problem, tiles: tuple[Tensor, ...], v: Tensor, out: tuple[Tensor, Tensor, Tensor], doc: Tensor | None, n: int,
    S0: Tensor | None, ST: Tensor | None, save: bool,
) -> None:  # fmt: skip
    """One launch: fills out = (o, h, V'; the latter two with save) and ST, n final states."""
    c = p.config
    sizes = (*strides(v), p.T, p.NT, p.HV)
    flags = {"V": p.V, "BV": c.state_bv, "HAS_S0": S0 is not None, "SAVE": save, "FINAL": ST is not None}
    programs = n * p.HV * (p.V // c.state_bv)
    flags["VARLEN"] = doc is not None
    if c.hopper:
        rows, *inputs = _panels(tiles)
        leaving = _leaving(p, *out[1:], rows) if save else (None, None)
        args = (v, doc, *inputs, S0, out[0], *leaving, ST, *sizes, rows)
        launch(state_hopper_kernel, programs, *args, **flags, NW=c.state_warps, num_warps=c.state_warps)
    else:
        args = (v, doc, *tiles, S0, *out, ST, *sizes)
        meta = {**p.meta, **flags}
        launch(state_kernel, programs, *args, K=p.K, **meta, NS=1, num_warps=c.state_warps)


def _state(
    p: Problem, tiles: tuple[Tensor, ...], v: Tensor, out: tuple[Tensor, Tensor, Tensor], doc: Tensor | None, n: int,
    S0: Tensor | None, final: bool, save: bool,
) -> Tensor | None:  # fmt: skip
    ST = _states(p, n, v.device) if final else None
    state_whole(p, tiles, v, out, doc, n, S0, ST, save)
    return ST


def reverse_whole(
    p: Problem, tiles: tuple[Tensor, ...], do: Tensor, out: tuple[Tensor, Tensor], doc: Tensor | None, n: int,
    dST: Tensor | None, dS0: Tensor | None,
) -> None:  # fmt: skip
    """One launch: fills out = (dS, Y) and dS0, gradients of n initial states."""
    c = p.config
    sizes = (*strides(do), p.T, p.NT, p.HV)
    flags = {"V": p.V, "BV": c.state_bv, "HAS_DST": dST is not None, "DS0": dS0 is not None}
    programs = n * p.HV * (p.V // c.state_bv)
    flags["VARLEN"] = doc is not None
    if c.hopper:
        rows, *inputs = _panels(tiles)
        args = (do, doc, *inputs, dST, *_leaving(p, *out, rows), dS0, *sizes, rows)
        launch(reverse_hopper_kernel, programs, *args, **flags, NW=c.state_warps, num_warps=c.state_warps)
    else:
        args = (do, doc, *tiles, dST, *out, dS0, *sizes)
        meta = {**p.meta, **flags}
        launch(reverse_kernel, programs, *args, K=p.K, **meta, NS=1, num_warps=c.state_warps)


def _reverse(
    p: Problem, tiles: tuple[Tensor, ...], do: Tensor, out: tuple[Tensor, Tensor], doc: Tensor | None, n: int,
    dST: Tensor | None, want: bool,
) -> Tensor | None:  # fmt: skip
    dS0 = _states(p, n, do.device) if want else None
    reverse_whole(p, tiles, do, out, doc, n, dST, dS0)
    return dS0


def segment_table(p: Problem, n: int, device: torch.device) -> Tensor:
    """int32 [n, 4] = (first chunk, chunks, first row, end row) of a stream cut in n, made on the device."""
    each = -(-p.NT // n)
    first = torch.arange(n, device=device, dtype=torch.int32) * each
    last = (first + each).clamp(max=p.NT)
    return torch.stack([first, last - first, first * 64, (last * 64).clamp(max=p.T)], 1).contiguous()


def state_pass(
    p: Problem, tiles: tuple[Tensor, ...], v: Tensor, out: tuple[Tensor, Tensor, Tensor], S0: Tensor | None,
    final: bool, save: bool,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Fills out = (o, h, V').  Returns the final state [N, HV, K, V] if wanted, and every segment's M (empty if whole)."""
    n = p.segments
    if n == 1:
        return _state(p, tiles, v, out, p.doc, p.N, S0, final, save), v.new_empty(0)
    doc = segment_table(p, n, v.device)
    zeros = v.new_zeros(1, 1, 1, p.V).expand(1, p.T, p.HV, p.V)
    eye = torch.eye(p.K, device=v.device, dtype=F32).expand(n, p.HV, p.K, p.K).contiguous()
    M = _state(p, tiles, zeros, out, doc, n, eye, True, False)
    h = _state(p, tiles, v, out, doc, n - 1, None, True, False)
    assert M is not None and h is not None
    starts = [torch.zeros_like(h[0]) if S0 is None else S0[0]]
    for i in range(n - 1):
        starts.append((M[i].double() @ starts[i].double()).to(F32) + h[i])
    ST = _state(p, tiles, v, out, doc, n, torch.stack(starts), final, save)
    return None if ST is None else ST[-1:], M


def reverse_pass(
    p: Problem, tiles: tuple[Tensor, ...], do: Tensor, out: tuple[Tensor, Tensor], M: Tensor, dST: Tensor | None,
    want: bool,
) -> Tensor | None:  # fmt: skip
    """Fills out = (dS of every chunk's end, Y).  Returns the gradient of the initial state if wanted."""
    n = p.segments
    if n == 1:
        return _reverse(p, tiles, do, out, p.doc, p.N, dST, want)
    doc = segment_table(p, n, do.device)
    d = _reverse(p, tiles, do, out, doc[1:].contiguous(), n - 1, None, True)
    assert d is not None
    ends = [torch.zeros_like(d[0]) if dST is None else dST[0]]
    for i in range(n - 1, 0, -1):
        ends.insert(0, (M[i].double().mT @ ends[0].double()).to(F32) + d[i - 1])
    dS0 = _reverse(p, tiles, do, out, doc, n, torch.stack(ends), want)
    return None if dS0 is None else dS0[:1]
