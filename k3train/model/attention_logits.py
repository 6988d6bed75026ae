"""The largest attention logit of each head, for QK-Clip: exact, without a square of the sequence in memory."""

from __future__ import annotations

import torch

ELEMENTS = 1 << 25  # scores that exist at once
KEYS = 4096


@torch.no_grad()
def largest_logits(
    q: torch.Tensor, k: torch.Tensor, scale: float, documents: torch.Tensor | None = None
) -> torch.Tensor:
    """max over visible pairs of scale * q . k, fp32 [H].

    q [n, H, K] are the last n of the m positions of k [m, H, K]; a query sees itself and what comes before it, and,
    where documents int32 [m], ascending, is given, only its own document. Products are summed and kept in fp32.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k.dtype:
        from k3train.model.attention_logits_triton import largest_products

        return largest_products(q.detach(), k.detach(), documents) * scale
    return in_blocks(q, k, scale, documents)


def in_blocks(q: torch.Tensor, k: torch.Tensor, scale: float, documents: torch.Tensor | None = None) -> torch.Tensor:
    """`largest_logits` by torch's products, a block of scores at a time."""
    n, heads, _ = q.shape
    m = k.shape[0]
    queries, keys = q.detach().transpose(0, 1), k.detach().permute(1, 2, 0)
    positions = torch.arange(m, device=q.device)
    width = min(KEYS, m)
    height = max(1, min(n, ELEMENTS // (heads * width)))
    best = torch.full((heads,), -torch.inf, device=q.device)
    for i in range(0, n, height):
        rows = slice(i, min(i + height, n))
        at = positions[m - n + rows.start : m - n + rows.stop, None]
        for j in range(0, m - n + rows.stop, width):
            columns = slice(j, min(j + width, m - n + rows.stop))
            scores = torch.bmm(queries[:, rows].float(), keys[:, :, columns].float())
            hidden = positions[columns] > at
            if documents is not None:
                hidden |= documents[columns] != documents[at]
            elif columns.stop <= m - n + rows.start + 1:
                hidden = None  # every key is visible
            if hidden is not None:
                scores.masked_fill_(hidden, -torch.inf)
            best = torch.maximum(best, scores.amax((-2, -1)))
    return best * scale
