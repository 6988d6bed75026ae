"""Newton-Schulz of a few matrices at a time by replaying one CUDA graph, so that they stay in the GPU's L2 cache.

A few matrices a launch are launch-bound on a GPU: below 2^24 elements at a time, an H200 took 30 to 44 us a launch
whatever the launch did. A graph of all products of all steps is one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

Iterate = Callable[[Tensor, int], None]  # (stack, steps), in place


@functools.cache
def _captured(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, steps: int, iterate: Iterate
) -> tuple[Tensor, torch.cuda.CUDAGraph]:
    """The graph of an iteration and the stack that it works on in place."""
    stack = torch.ones(shape, dtype=dtype, device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # compiles the kernels, makes cuBLAS's workspace
        iterate(stack, steps)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iterate(stack, steps)
    return stack, graph


def replayed_(stack: Tensor, count: int, steps: int, iterate: Iterate) -> None:
    """`iterate` on every `count` matrices of a CUDA stack [n, A, B], in place; the rest, fewer than that, directly."""
    held, graph = _captured((count, *stack.shape[1:]), stack.dtype, stack.device, steps, iterate)
    for part in stack.split(count):
        if part.shape[0] < count:
            iterate(part, steps)
        else:
            held.copy_(part)
            graph.replay()
            part.copy_(held)
