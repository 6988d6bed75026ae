"""A stream cut into segments gives what the stream gives: outputs, final states and every gradient."""

from __future__ import annotations

import pytest
import torch

from k3kernels.kda import kda
from k3kernels.kda.split import kda_split

H, K, V = 2, 8, 12


def inputs(batch: int, tokens: int, states: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    return [
        draw(batch, tokens, H, K), draw(batch, tokens, H, K), draw(batch, tokens, H, V), draw(batch, tokens, H, K),
        draw(batch, tokens, H), draw(H), draw(H, K), draw(states, H, K, V),
    ]  # fmt: skip


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "softplus"])
@pytest.mark.parametrize(
    ("batch", "tokens", "documents", "length"),
    [
        (1, 100, None, 32),
        (2, 70, None, 16),
        (1, 90, [0, 1, 50, 50, 90], 16),
        (1, 64, None, 64),
        (1, 40, [0, 20, 40], 7),
    ],
    ids=["uneven tail", "batch", "documents and an empty one", "nothing to cut", "lengths off the tile"],
)
def test_segments_equal_one_pass(
    batch: int, tokens: int, documents: list[int] | None, length: int, bound: float | None
) -> None:
    cu = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    states = batch if documents is None else len(documents) - 1
    results = []
    for split in (False, True):
        args = inputs(batch, tokens, states)
        options = {"bound": bound, "initial_state": args[7], "cu_seqlens": cu, "output_final_state": True}
        if split:
            o, end = kda_split(*args[:7], segment_length=length, **options)
        else:
            o, end = kda(*args[:7], **options)
        g = torch.Generator().manual_seed(1)
        loss = (o * torch.randn(o.shape, generator=g, dtype=o.dtype)).sum()
        loss = loss + (end * torch.randn(end.shape, generator=g, dtype=end.dtype)).sum()
        results.append([o, end, *torch.autograd.grad(loss, args)])
    for one, cut in zip(*results):
        assert torch.allclose(one, cut, rtol=1e-9, atol=1e-10)


def test_a_segment_of_no_tokens_is_refused() -> None:
    args = inputs(1, 8, 1)
    with pytest.raises(ValueError, match="segment_length: expected at least 1, got 0"):
        kda_split(*args[:7], segment_length=0)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1024, 4096])
def test_segments_on_a_gpu(length: int) -> None:
    g = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cuda").bfloat16()

    q, k, v, z = (draw(1, 8192, 2, 128) for _ in range(4))
    beta, A_log, dt_bias = draw(1, 8192, 2), torch.zeros(2, device="cuda"), torch.zeros(2, 128, device="cuda")
    one, _ = kda(q, k, v, z, beta, A_log, dt_bias)
    cut, _ = kda_split(q, k, v, z, beta, A_log, dt_bias, segment_length=length)
    assert float((one.float() - cut.float()).norm() / one.float().norm()) < 1e-2
