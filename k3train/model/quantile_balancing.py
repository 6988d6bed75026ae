"""Quantile balancing (report section 2.3.3, appendices C and D): a selection bias per expert, solved once a step.

For a token, s_j is the sigmoid score of expert j, b_j its bias, and alpha the (k+1)-th largest of s + b: the cut-off.
r_j = alpha - s_j is the bias at which expert j would just be selected. The new bias is the (k / n)-quantile of r_j
over every token of the global batch, mean-centred. Ranks add integer histograms, so the result does not depend on
how the batch was split. All functions are pure; the router owns the state.
"""

from __future__ import annotations

import torch


def bin_range(bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., E] -> (lo, hi) fp64 [...] that contain every required bias: s is in (0, 1), alpha within the biases."""
    b = bias.double()
    return b.amin(-1) - 1.0, b.amax(-1) + 1.0


def required_bias(scores: torch.Tensor, bias: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes and required biases of each token.

    scores fp32 [T, E], bias fp32 [E] -> experts int64 [T, k] (by biased score), r fp64 [T, E]. The cut-off expert's
    r is its own bias exactly, whatever rounding s + b had.
    """
    top = torch.topk(scores + bias, top_k + 1, dim=-1)
    experts, cut_off = top.indices[:, :top_k], top.indices[:, top_k:]
    alpha = top.values[:, top_k:].double()
    r = alpha - scores.double()
    r.scatter_(1, cut_off, bias.double()[cut_off])
    return experts, r


def histogram(r: torch.Tensor, bias: torch.Tensor, bins: int, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Counts int64 [E, bins] of required biases fp64 [T, E]; bin = floor((r - lo) bins / (hi - lo)) in fp64.

    Tokens with valid[t] False (padding) are left out.
    """
    if valid is not None:
        r = r[valid]
    lo, hi = bin_range(bias)
    index = torch.floor((r - lo) * bins / (hi - lo)).long().clamp_(0, bins - 1)
    experts = r.shape[1]
    index += torch.arange(experts, device=r.device) * bins
    flat = torch.zeros(experts * bins, dtype=torch.int64, device=r.device)
    flat.scatter_add_(0, index.reshape(-1), torch.ones_like(index).reshape(-1))
    return flat.view(experts, bins)


def solve(counts: torch.Tensor, bias: torch.Tensor, top_k: int) -> torch.Tensor:
    """Pooled counts int64 [..., E, bins] and the bias they were taken under, fp32 [..., E] -> quantile fp64 [..., E],
    not centred. Leading dimensions are layers, solved together; no value is read on the host.

    Target rank q = m k / n for m counted tokens: the first bin whose cumulative count reaches ceil(q), interpolated
    linearly inside it. With no tokens counted the bias stays.
    """
    experts, bins = counts.shape[-2:]
    tokens = counts[..., 0, :].sum(-1)
    q = (tokens * top_k).double() / experts
    lo, hi = bin_range(bias)
    width = (hi - lo) / bins
    cumulative = counts.cumsum(-1)
    first = (cumulative >= q.ceil()[..., None, None]).to(torch.int8).argmax(-1)
    in_bin = counts.gather(-1, first[..., None])[..., 0].double()
    before = cumulative.gather(-1, first[..., None])[..., 0].double() - in_bin
    fraction = ((q[..., None] - before) / in_bin).clamp(0.0, 1.0)
    solved = lo[..., None] + (first.double() + fraction) * width[..., None]
    return torch.where(tokens[..., None] > 0, solved, bias.double())


def update(counts: torch.Tensor, bias: torch.Tensor, top_k: int, *, ema: float = 0.0) -> torch.Tensor:
    """The bias of the next step, fp32 [..., E]: the quantile, optionally averaged with the old bias, mean-centred."""
    estimate = solve(counts, bias, top_k)
    if ema:
        estimate = ema * bias.double() + (1.0 - ema) * estimate
    return (estimate - estimate.mean(-1, keepdim=True)).float()


def sign_update(load: torch.Tensor, bias: torch.Tensor, step: float) -> torch.Tensor:
    """Fixed-step balancing: raise the bias of under-loaded experts, lower the others, mean-centred. fp32 [..., E]."""
    load = load.double()
    moved = bias.double() + step * torch.sign(load.mean(-1, keepdim=True) - load)
    return (moved - moved.mean(-1, keepdim=True)).float()


def max_violation(load: torch.Tensor) -> torch.Tensor:
    """MaxVio = max_j load_j / mean(load) - 1 over the last dimension."""
    load = load.double()
    return load.max(-1).values / load.mean(-1).clamp_min(1e-12) - 1.0
