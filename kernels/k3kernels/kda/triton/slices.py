"""One long stream in slices: the serial passes of one slice beside the chunk-parallel kernels of the next.

A serial pass with few heads fills half of the multiprocessors; chunk-parallel kernels fill the other half meanwhile.  A
slice's serial pass starts from the state that the pass before left in fp32, so that every bit is that of the whole stream.

The serial passes have a stream of high priority.  A program of theirs needs most of a multiprocessor's shared memory, which
running chunk programs would never free together; so each step is arranged to start on an empty device, where the
serial programs are placed first: forward, a slice's preparation waits for the state of the slice two before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from .passes import reverse_whole, segment_table, state_whole
from .plan import Problem
from .stages import Inputs, KeyGradients, Saved, kside, prep, vside


@lru_cache
def _side(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index, priority=-1)


class Lanes:
    """The caller's stream and, on a GPU, one of high priority beside it."""

    def __init__(self, device: torch.device) -> None:
        self.main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.side = _side(self.main.device_index) if self.main is not None else None

    @contextmanager
    def beside(self, wait: bool = True) -> Iterator[None]:
        """What is launched here waits for all that the caller's stream holds so far, unless told not to."""
        if self.main is None or self.side is None:
            yield
            return
        if wait:
            self.side.wait_stream(self.main)
        with torch.cuda.stream(self.side):
            yield

    def mark(self) -> Callable[[], None]:
        """Called later, makes the caller's stream wait for what was launched beside it until now."""
        main, side = self.main, self.side
        if main is None or side is None:
            return lambda: None
        event = side.record_event()
        return lambda: main.wait_event(event)


def _parts(p: Problem) -> list[tuple[Problem, slice, slice, slice]]:
    """Of every slice: its problem, and which tokens, chunks and tiles it has."""
    each = -(-p.NT // p.slices)
    out = []
    for a in range(0, p.NT, each):
        b = min(a + each, p.NT)
        rows = slice(a * 64, min(b * 64, p.T))
        part = replace(p, T=rows.stop - rows.start, NT=b - a, NC=b - a, slices=1)
        out.append((part, rows, slice(a, b), slice(a * p.HV, b * p.HV)))
    return out


def forward(
    p: Problem, x: Inputs, s: Saved, o: Tensor, S0: Tensor | None, final: bool, save: bool
) -> Tensor | None:  # fmt: skip
    """Fills s and o; the final state if wanted."""
    parts, lanes = _parts(p), Lanes(x.q.device)
    doc = segment_table(p, len(parts), x.q.device)
    states = torch.empty(len(parts), 1, p.HV, p.K, p.V, dtype=torch.float32, device=x.q.device)
    ended: list[Callable[[], None]] = []
    for i, (part, rows, _, tiles) in enumerate(parts):
        if i > 1:
            ended[i - 2]()
        prep(part, x.part(rows), s.part(tiles))
        with lanes.beside():
            start = S0 if i == 0 else states[i - 1]
            state_whole(p, s.tiles, x.v, (o, s.h, s.vn), doc[i : i + 1], 1, start, states[i], save)
        ended.append(lanes.mark())
    ended[-1]()
    return states[-1].clone() if final else None


def backward(
    p: Problem, x: Inputs, s: Saved, o: Tensor, do: Tensor, dST: Tensor | None, dv: Tensor, db: Tensor
) -> tuple[KeyGradients, Tensor]:
    """Fills dv and dbeta; the other gradients, and that of the initial state."""
    parts, lanes = _parts(p), Lanes(x.q.device)
    doc = segment_table(p, len(parts), x.q.device)
    n = len(parts)
    dS = torch.empty(p.tiles, p.V, p.K, dtype=x.q.dtype, device=x.q.device)
    Y = torch.empty(p.tiles, 64, p.V, dtype=x.q.dtype, device=x.q.device)
    starts = torch.empty(n, 1, p.HV, p.K, p.V, dtype=torch.float32, device=x.q.device)
    out = KeyGradients.new(p, x)

    def reverse(i: int) -> Callable[[], None]:
        end = dST if i == n - 1 else starts[i + 1]
        reverse_whole(p, s.tiles, do, (dS, Y), doc[i : i + 1], 1, end, starts[i])
        return lanes.mark()

    with lanes.beside():
        ended = reverse(n - 1)
    for i in reversed(range(n)):
        part, rows, chunks, tiles = parts[i]
        waits = ended
        if i > 0:
            with lanes.beside(wait=False):
                ended = reverse(i - 1)
        waits()
        a, b = x.part(rows), s.part(tiles)
        products = vside(part, a, o[:, rows], do[:, rows], b, dS[tiles], Y[tiles], dv[:, rows], db[:, rows])
        kside(part, a, b, products, out.part(rows, chunks))
    return out, starts[0]
