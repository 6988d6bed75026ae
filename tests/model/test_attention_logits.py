"""The largest logit of each head, found in blocks, against the whole table of scores."""

from __future__ import annotations

import pytest
import torch

from k3train.model import attention_logits
from k3train.model.attention_logits import largest_logits


def whole_table(q: torch.Tensor, k: torch.Tensor, scale: float, documents: torch.Tensor | None) -> torch.Tensor:
    n, m = q.shape[0], k.shape[0]
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k.double()) * scale
    seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    if documents is not None:
        seen &= documents[m - n :, None] == documents[None, :]
    return scores.masked_fill(~seen, -torch.inf).amax((-2, -1))


@pytest.mark.parametrize("blocks", [(1 << 25, 4096), (3 * 5 * 4, 5), (3 * 7, 7)], ids=["one block", "4x5", "1x7"])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize(("n", "m"), [(23, 23), (9, 23), (1, 1)])
def test_equals_the_whole_table(
    monkeypatch: pytest.MonkeyPatch, blocks: tuple[int, int], packed: bool, n: int, m: int
) -> None:
    monkeypatch.setattr(attention_logits, "ELEMENTS", blocks[0])
    monkeypatch.setattr(attention_logits, "KEYS", blocks[1])
    generator = torch.Generator().manual_seed(n + m)
    q, k = (torch.randn(rows, 3, 6, generator=generator) for rows in (n, m))
    documents = torch.tensor([0] * 5 + [1] + [2] * 12 + [3] * 5, dtype=torch.int32)[:m] if packed else None
    found = largest_logits(q, k, 0.3, documents).double()
    torch.testing.assert_close(found, whole_table(q, k, 0.3, documents), rtol=1e-6, atol=1e-6)  # fp32 products


def test_what_a_query_does_not_see_does_not_count() -> None:
    q, k = torch.ones(4, 1, 2), torch.ones(4, 1, 2)
    k[3] = 100.0  # in the future of all but the last query
    q[3] = -1.0
    assert float(largest_logits(q, k, 1.0)) == 2.0
    k[0] = 50.0  # of another document than the rest
    assert float(largest_logits(q[1:], k, 1.0, torch.tensor([0, 1, 1, 1], dtype=torch.int32))) == 2.0


def packed(
    n: int, m: int, width: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * m)
    q, k = (torch.randn(rows, 3, width, generator=generator).to(device, dtype) for rows in (n, m))
    documents = (torch.arange(m) * 5 // m).to(device, torch.int32)
    return q, k, documents


def check_the_kernel(n: int, m: int, width: int, dtype: torch.dtype, device: str) -> None:
    from k3train.model.attention_logits_triton import largest_products

    q, k, documents = packed(n, m, width, dtype, device)
    for given in (documents, None):
        want = whole_table(q.cpu(), k.cpu(), 1.0, None if given is None else given.cpu())
        torch.testing.assert_close(largest_products(q, k, given).cpu().double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize(("n", "m", "width"), [(150, 150, 24), (40, 300, 96)])
def test_the_kernel_equals_the_whole_table_interpreted(n: int, m: int, width: int) -> None:
    check_the_kernel(n, m, width, torch.float16, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "m", "width"), [(4096, 4096, 192), (1000, 3001, 192), (77, 77, 48)])
def test_the_kernel_equals_the_whole_table(n: int, m: int, width: int) -> None:
    check_the_kernel(n, m, width, torch.bfloat16, "cuda")
