"""The Triton convolution reads states only in blocks that hold a document's first tokens: documents that begin around the
borders of blocks, against the document loop in fp64 and bit for bit against a stream that needs no states."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from k3kernels.conv import short_convolution
from tests.kernels.helpers import assert_close
from tests.kernels.test_triton_small_kernels import random

BLOCK = 8
CHANNELS = 5
BORDERS = {
    "begin around a block's first row": [0, 7, 15, 17, 26],
    "begin two and three tokens off": [0, 6, 13, 18, 26],
    "begin with blocks and with the last token": [0, 8, 16, 24, 25],
    "begin once, over blocks that see no state": [0, 26],
    "are shorter than the taps": [0, 6, 7, 9, 10, 12, 18],
    "are empty at borders and at both ends": [0, 0, 8, 8, 8, 17, 18, 18],
    "are one of one token and an empty one": [0, 0, 1],
}


def run(
    x: Tensor, weight: Tensor, dy: Tensor, bounds: list[int], states: Tensor | None, backend: str = "triton"
) -> list[Tensor]:
    """y, dx, dweight and, with states, dstates."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, states) if t is not None]
    y, _ = short_convolution(
        leaves[0], leaves[1], initial_state=None if states is None else leaves[2],
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32), backend=backend,
    )  # fmt: skip
    return [y, *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize(
    ("cu_seqlens", "W", "dtype"),
    [
        *((borders, 4, torch.float32) for borders in BORDERS.values()),
        (BORDERS["are shorter than the taps"], 4, torch.bfloat16),
        (BORDERS["begin two and three tokens off"], 3, torch.float32),
    ],
    ids=[*(f"documents {name}" for name in BORDERS), "bf16", "three taps"],
)
def test_a_state_is_the_tokens_before_a_document(
    monkeypatch: pytest.MonkeyPatch, cu_seqlens: list[int], W: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("k3kernels.conv.triton_conv.ROWS", BLOCK)
    lengths, before = [end - begin for begin, end in pairwise(cu_seqlens)], W - 1
    x, dy = (random(1, cu_seqlens[-1], CHANNELS, seed=seed).to(dtype) for seed in (0, 3))
    weight, states = random(CHANNELS, W, seed=1).float(), random(len(lengths), CHANNELS, before, seed=2).to(dtype)
    actual = run(x, weight, dy, cu_seqlens, states)
    exact = run(x.double(), weight.double(), dy.double(), cu_seqlens, states.double(), "naive")
    assert_close(actual, exact, ["y", "dx", "dweight", "dstates"], 1e-5 if dtype == torch.float32 else 5e-3)

    def in_front(of_documents: Tensor, of_tokens: Tensor) -> Tensor:
        """[1, sum of (W-1 + length), C]: each document's W-1 rows, then its own."""
        pieces = zip(of_documents.mT, of_tokens[0].split(lengths))
        return torch.cat([rows for piece in pieces for rows in piece])[None]

    longer = list(accumulate((before + n for n in lengths), initial=0))
    nothing = torch.zeros_like(states)
    y, dx, _ = run(in_front(states, x), weight, in_front(nothing, dy), longer, None)
    own = in_front(nothing, torch.ones_like(x))[0, :, 0].bool()  # the rows that are documents' own
    # a row is by the branch for first tokens here and by the other there: both round every step alike
    for name, got, want in (("y", actual[0], y[:, own]), ("dx", actual[1], dx[:, own])):
        apart = (got - want).abs().max() / want.abs().max()
        assert torch.equal(got, want), f"{name} differs by {float(apart):.1e} of its largest magnitude"
