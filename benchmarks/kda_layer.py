"""Times what surrounds KDA in a layer on one GPU, against the bytes that must move: decoding, convolution, gated norm.

    python benchmarks/kda_layer.py
    python benchmarks/kda_layer.py --states    # only the convolution, with initial states and without

Floor: the bytes that any implementation must move at the bandwidth of a copy measured in the same run. Decoding reads
and writes the fp32 state (2 * 4 * K * V bytes a head), which is all but 1 % of its bytes. `device` is the time on the
device when the host runs ahead, as it does in a training step and in a captured graph; `eager` is one call after
another with an empty queue in front of each, launch included.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from device_time import device_ms, host_ms
from kda import ceilings

from k3kernels.conv import short_convolution_qkv, short_convolution_step, triton_conv
from k3kernels.kda import kda_decode
from k3kernels.norm import gated_rms_norm


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def decode(batch: int, heads: int, tokens: int = 1) -> tuple[Callable[[], Any], int]:
    x = [normal(batch, tokens, heads, 128) for _ in range(4)] + [normal(batch, tokens, heads)]
    shared = [torch.zeros(heads, device="cuda"), torch.zeros(heads, 128, device="cuda")]
    state = torch.zeros(batch, heads, 128, 128, device="cuda")
    return lambda: kda_decode(*x, *shared, state), 2 * state.numel() * 4


def convolution(
    tokens: int, channels: int, documents: int = 2, states: bool = False
) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    """Forward, forward with backward, and the bytes of q, k and v; each document is longer than the one before."""
    x = [normal(1, tokens, channels).requires_grad_() for _ in range(3)]
    w = [normal(channels, 4, dtype=torch.float32).requires_grad_() for _ in range(3)]
    bounds = [tokens * i * (i + 1) // (documents * (documents + 1)) for i in range(documents + 1)]
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    initial = [normal(documents, channels, 3).requires_grad_() for _ in range(3 * states)]

    def forward() -> list[Tensor]:
        return list(short_convolution_qkv(*x, *w, cu_seqlens=cu, initial_states=tuple(initial) or None)[:3])

    dy = [torch.randn_like(y) for y in forward()]
    return forward, lambda: torch.autograd.grad(forward(), x + w + initial, dy), 3 * tokens * channels * 2


def norm(tokens: int, heads: int) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    o, gate = (normal(1, tokens, heads, 128).requires_grad_() for _ in range(2))
    weight = torch.ones(128, device="cuda").requires_grad_()
    dy = torch.randn_like(o)

    def forward() -> Tensor:
        return gated_rms_norm(o, gate, weight)

    return forward, lambda: torch.autograd.grad(forward(), [o, gate, weight], dy), o.numel() * 2


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kda_layer.py: needs a CUDA device")
    bandwidth, _ = ceilings()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; copy {bandwidth:.0f} GB/s"
    )
    print(f"{'what':44} {'device':>8} {'floor':>8} {'ratio':>6} {'eager':>8} {'host':>8}   (us)")

    def row(what: str, call: Callable[[], Any], moved: int) -> None:
        us = device_ms(call) * 1e3
        floor = moved / bandwidth / 1e3
        eager = triton.testing.do_bench(call, 5, 30, return_mode="median") * 1e3
        host = host_ms(call) * 1e3
        print(f"{what:44} {us:8.1f} {floor:8.1f} {us / floor:6.2f} {eager:8.1f} {host:8.1f}", flush=True)

    if "--states" in sys.argv[1:]:
        for name, states, unroll in (("no", False, 1), ("unroll 1", True, 1), ("unroll 4", True, 4)):
            triton_conv.NEAR_UNROLL = unroll
            forward, both, size = convolution(32768, 3072, documents=20, states=states)
            row(f"convolution 32768 x 3072, {name} states, forward", forward, 2 * size)
            row(f"convolution 32768 x 3072, {name} states, both", both, 5 * size)
        return
    for batch, heads, tokens in ((64, 32, 1), (64, 96, 1), (8, 96, 1), (1, 96, 1), (64, 32, 4)):
        call, moved = decode(batch, heads, tokens)
        row(f"decode, batch {batch}, {heads} heads, {tokens} tokens", call, moved)
    channels = 96 * 128
    x, w = normal(64, 1, channels), normal(channels, 4, dtype=torch.float32)
    state = normal(64, channels, 3)
    row(
        "convolution step, batch 64, 96 heads", lambda: short_convolution_step(x, w, state), (2 * 3 + 2) * 2 * x.numel()
    )
    for tokens, heads in ((8192, 96), (16384, 16)):
        forward, both, size = convolution(tokens, heads * 128)
        row(f"convolution q k v, {tokens} x {heads}, forward", forward, 2 * size)
        row(f"convolution q k v, {tokens} x {heads}, both", both, 5 * size)
        forward, both, size = norm(tokens, heads)
        row(f"gated norm, {tokens} x {heads}, forward", forward, 3 * size)
        row(f"gated norm, {tokens} x {heads}, both", both, 8 * size)


if __name__ == "__main__":
    main()
