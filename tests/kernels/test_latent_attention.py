"""Attention over latents: torch against float64 sums, Triton (interpreted, or on a GPU) against the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from k3kernels.latent_attention import latent_attention

on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"


def case(B: int, H: int, S: int, values: int, rest: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(B, H, values + rest, generator=generator).to(dtype)
    return q, torch.randn(B, S, values + rest, generator=generator).to(dtype)


def expected(q: Tensor, latents: Tensor, lengths: list[int], values: int, scale: float) -> Tensor:
    """Sequence by sequence in float64."""
    rows = []
    for q_b, c_b, n in zip(q.double(), latents.double(), lengths):
        c = c_b[:n]
        rows.append(torch.softmax(q_b @ c.T * scale, -1) @ c[:, :values])
    return torch.stack(rows)


def check(q: Tensor, latents: Tensor, lengths: list[int], values: int, backend: str) -> None:
    scale = q.shape[-1] ** -0.5
    latents = latents.clone()
    for b, n in enumerate(lengths):
        latents[b, n:] = 1e4  # what lies beyond a sequence must not be seen
    o = latent_attention(
        q.to(DEVICE), latents.to(DEVICE), torch.tensor(lengths, device=DEVICE), values=values, scale=scale,
        backend=backend,
    ).cpu()  # fmt: skip
    assert o.dtype == q.dtype
    want = expected(q, latents, lengths, values, scale)
    error = (o.double() - want).abs().max() / want.abs().max()
    assert error < (1e-2 if q.dtype == torch.bfloat16 else 3e-6), float(error)


SHAPES = {
    "one token": (1, 2, 1, 32, 16, [1]),
    "three sequences of different lengths": (3, 4, 150, 32, 16, [150, 1, 77]),
    "heads, channels and tokens that fill no tile": (2, 5, 83, 24, 8, [83, 64]),
    "more heads than a tile": (1, 70, 40, 16, 16, [33]),
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_softmax_over_the_sequence_so_far(shape: tuple[Any, ...], backend: str) -> None:
    *sizes, lengths = shape
    check(*case(*sizes), lengths, sizes[3], backend)


@pytest.mark.parametrize(("heads", "tokens"), [(16, 16), (64, 32), (64, 16)])
def test_tiles_with_either_side_long_agree(heads: int, tokens: int) -> None:
    from k3kernels.latent_attention.triton_split import Tile, latent_attention_triton

    q, latents = case(2, 20, 90, 32, 16)
    lengths = [90, 47]
    tile = Tile(tokens, heads, 4, 1, 6)
    o = latent_attention_triton(q.to(DEVICE), latents.to(DEVICE), torch.tensor(lengths, device=DEVICE), 32, 0.2, tile)
    want = expected(q, latents, lengths, 32, 0.2)
    assert float((o.cpu().double() - want).abs().max() / want.abs().max()) < 3e-6


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_bfloat16_sums_in_fp32(backend: str) -> None:
    check(*case(2, 4, 100, 32, 16, torch.bfloat16), [100, 31], 32, backend)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 3, 8).half()}, TypeError, "one dtype, bfloat16 or float32"),
        ({"latents": torch.zeros(2, 5, 9)}, ValueError, r"latents: expected \[B, S, D\] for q \[2, 3, 8\]"),
        ({"values": 9}, ValueError, r"values: expected 1 ... 8 channels, got 9"),
        ({"lengths": torch.ones(3, dtype=torch.int64)}, ValueError, r"lengths: expected integers \[B\] = \[2\]"),
        ({"backend": "cuda"}, ValueError, "backend: expected one of auto, torch, triton"),
    ],
    ids=["dtype", "latents", "values", "lengths", "backend"],
)
def test_bad_argument_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"q": torch.zeros(2, 3, 8), "latents": torch.zeros(2, 5, 8), "lengths": torch.ones(2, dtype=torch.int64),
            "values": 6, "scale": 1.0}  # fmt: skip
    with pytest.raises(error, match=message):
        latent_attention(**{**good, **change})


@pytest.mark.gpu
@pytest.mark.skipif(not on_gpu, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("heads", "lengths"), [(24, [5000]), (96, [1, 4097, 777]), (32, [70_000, 3])], ids=["proxy", "K3", "long"]
)
def test_on_a_gpu_at_full_width(heads: int, lengths: list[int], dtype: torch.dtype) -> None:
    check(*case(len(lengths), heads, max(lengths) + 5, 512, 64, dtype), lengths, 512, "auto")
