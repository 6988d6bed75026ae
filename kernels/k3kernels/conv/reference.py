"""The short convolution in plain torch: a token loop that is the truth, and the path that trains on CPU.

    y_t = silu( sum_{w=0}^{W-1} weight[:, w] * x_{t - (W-1) + w} )

where inputs before a document's start come from its initial state, or are zero. Sums are fp32 (fp64 for fp64 inputs),
rounded once to x's dtype.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """fp64 stays, everything else computes in fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def short_convolution_naive(
    x: Tensor, weight: Tensor, *, cu_seqlens: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Document by document with the inputs before it laid in front; differentiable by autograd.

    x [B,T,C], weight [C,W], initial_state [N,C,W-1]. Returns y [B,T,C] and the last inputs [N,C,W-1] of each document.
    """
    dtype, (B, T, C), W = compute_dtype(x), x.shape, weight.shape[1]
    if cu_seqlens is None:
        pieces = list(x.unbind(0))
    else:
        bounds = cu_seqlens.tolist()
        pieces = [x[0, start:end] for start, end in zip(bounds, bounds[1:])]
    outputs, states = [], []
    for n, piece in enumerate(pieces):
        before = x.new_zeros(W - 1, C) if initial_state is None else initial_state[n].mT.to(x.dtype)
        padded = torch.cat([before, piece]).to(dtype)
        length = piece.shape[0]
        y = sum(
            (padded[w : w + length] * weight[:, w].to(dtype) for w in range(W)), x.new_zeros(length, C, dtype=dtype)
        )
        outputs.append(F.silu(y).to(x.dtype))
        states.append(padded[length:].mT)
    return torch.cat(outputs).view(B, T, C), torch.stack(states)


class CausalTaps(torch.autograd.Function):
    """sum_w weight[:, w] x_{t-(W-1)+w} on a flat stream [T,C], never reaching across `starts` (document starts)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, starts)
        W = weight.shape[1]
        y = x * weight[:, -1]
        for lag in range(1, min(W, x.shape[0])):
            y[lag:].addcmul_(_lagged(x, starts, lag), weight[:, W - 1 - lag])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, starts = ctx.saved_tensors
        W = weight.shape[1]
        dx = dy * weight[:, -1]
        dweight = torch.zeros_like(weight)
        dweight[:, -1] = torch.linalg.vecdot(x, dy, dim=0)
        for lag in range(1, min(W, x.shape[0])):
            reached = dy[lag:].index_fill(0, _unreached(starts, lag, x.shape[0]), 0)
            dx[:-lag].addcmul_(reached, weight[:, W - 1 - lag])
            dweight[:, W - 1 - lag] = torch.linalg.vecdot(x[:-lag], reached, dim=0)
        return dx, dweight, None


def _unreached(starts: Tensor, lag: int, tokens: int) -> Tensor:
    """Rows of x[:-lag] that belong to an earlier document than the token `lag` later."""
    rows = (starts.unsqueeze(1) - 1 - torch.arange(lag, device=starts.device)).flatten()
    return rows[(rows >= 0) & (rows < tokens - lag)]


def _lagged(x: Tensor, starts: Tensor, lag: int) -> Tensor:
    """The inputs `lag` tokens before, zero where those belong to another document: [T-lag, C]."""
    return x[:-lag].index_fill(0, _unreached(starts, lag, x.shape[0]), 0)


def document_bounds(B: int, T: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Boundaries int64 [N+1] in the flat stream of B * T tokens."""
    if cu_seqlens is None:
        return torch.arange(B + 1, device=device) * T
    return cu_seqlens.to(device, torch.int64)


def last_inputs(x: Tensor, W: int, cu_seqlens: Tensor | None, initial_state: Tensor | None) -> Tensor:
    """The last W-1 inputs of each document, [N,C,W-1], reaching into its initial state when it is shorter than that."""
    B, T, C = x.shape
    bounds = document_bounds(B, T, cu_seqlens, x.device)
    history = torch.arange(W - 1, device=x.device)
    rows = bounds[1:].unsqueeze(1) - (W - 1) + history
    from_stream = (rows >= bounds[:-1].unsqueeze(1)).unsqueeze(-1)
    flat = x.reshape(B * T, C)
    tail = flat.new_zeros(rows.shape[0], W - 1, C) if B * T == 0 else flat[rows.clamp(min=0)]
    if initial_state is None:
        return torch.where(from_stream, tail, 0).mT
    lengths = (bounds[1:] - bounds[:-1]).unsqueeze(1)
    old = (history + lengths).clamp(max=max(W - 2, 0)).unsqueeze(-1).expand(-1, -1, C)
    return torch.where(from_stream, tail, initial_state.to(x.dtype).mT.gather(1, old)).mT


def short_convolution_torch(
    x: Tensor, weight: Tensor, *, cu_seqlens: Tensor | None = None, initial_state: Tensor | None = None
) -> Tensor:
    """Vectorised over the stream; arguments as in `short_convolution_naive`. Returns y [B,T,C]."""
    dtype, (B, T, C), W = compute_dtype(x), x.shape, weight.shape[1]
    taps = weight.to(dtype)
    bounds = document_bounds(B, T, cu_seqlens, x.device)
    y = CausalTaps.apply(x.reshape(B * T, C).to(dtype), taps, bounds[:-1])
    if initial_state is not None and W > 1:
        # The first W-1 tokens of each document also see its initial state; a document may be shorter than that.
        state = initial_state.to(x.dtype).to(dtype).mT  # [N, W-1, C]
        reach = [torch.einsum("nwc,cw->nc", state[:, i:], taps[:, : W - 1 - i]) for i in range(W - 1)]
        rows = bounds[:-1].unsqueeze(1) + torch.arange(W - 1, device=x.device)
        inside = rows < bounds[1:].unsqueeze(1)
        y = y.index_add(0, rows[inside], torch.stack(reach, 1)[inside])
    return F.silu(y).to(x.dtype).view(B, T, C)
