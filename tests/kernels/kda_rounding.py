"""Where the bf16 KDA kernels round, and what that does to the sums dA_log and dbeta.

`chunked_passes` is the kernels' arithmetic in fp64 (k3kernels/kda/triton, whose names it uses), with a call of `rounding`
at every point where they round: decayed operands, A, L, M, the terms of the inverse, states, X, V', their gradients, dA, dL
and the products with states.  fp32 sums and the two-term token sums are exact beside these.

A rounding is an error of ulp / sqrt(12), independent of all others; what it does to a result is its gradient.  So one
backward pass through `chunked_passes` gives the standard deviation that a result has from rounding (`predicted_errors`), for
these very inputs.  It is needed because the sums are not judged well by the size of their terms: dg is a sum over the later
tokens of a chunk, so that one rounding moves the terms of up to 64 tokens of a channel together.  With gates that hardly
decay the error of dA_log then reaches 1-4e-2 of the root sum square of its terms, where independent errors of 5e-3 a term
would average to 5e-3 of it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LOG2E = 1.4426950408889634
MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
Rounding = Callable[[Tensor, torch.dtype], Tensor]


def exact(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.float().to(dtype).to(x.dtype)


class Unsettled:
    """Rounding to nearest after a relative error of the size that fp32 sums and approximate exponentials have: which way
    a value near the middle of two neighbours goes is then a matter of chance, as it is between two versions of a kernel."""

    def __init__(self, seed: int, size: float = 2e-7) -> None:
        self.generator, self.size = torch.Generator().manual_seed(seed), size

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return nearest(x * (1 + self.size * noise), dtype)


class Taps:
    """Rounds nothing; keeps every value that would be rounded, for its gradient."""

    def __init__(self) -> None:
        self.values: list[tuple[Tensor, torch.dtype]] = []

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.clone() if x.requires_grad else x.clone().requires_grad_()
        self.values.append((x, dtype))
        return x

    def variance(self, result: Tensor) -> Tensor:
        """Per head (the first dimension of everything) of the sum over `result`'s other dimensions."""
        total = torch.zeros(result.shape[0], dtype=result.dtype, device=result.device)
        gradients = torch.autograd.grad(result.sum(), [x for x, _ in self.values], retain_graph=True, allow_unused=True)
        for (x, dtype), gradient in zip(self.values, gradients):
            if gradient is not None:
                value = x.detach()
                ulp = torch.exp2(value.abs().clamp_min(1e-300).log2().floor() - MANTISSA[dtype])
                ulp = torch.where(nearest(value, dtype) == value, 0.0, ulp)  # zeros, and the ones on M's diagonal
                total += (ulp * gradient).square().flatten(1).sum(1) / 12
        return total


def _chunks(x: Tensor) -> Tensor:
    """[T, HV, D] -> [HV, chunks, 64, D], zeros beyond T."""
    T, HV, D = x.shape
    n = -(-T // 64)
    padded = torch.cat([x, x.new_zeros(n * 64 - T, HV, D)])
    return padded.view(n, 64, HV, D).permute(2, 0, 1, 3)


def _blocks(G: Tensor, block: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(pairs [32, 32], queries' factor, keys' factor) of a half's products; G its cumulative log2 decay."""
    i = torch.arange(32, device=G.device)[:, None]
    j = i.T

    def from_middle(size: int) -> Tensor:
        x = G.unflatten(2, (32 // size, size))
        return (x - x[:, :, :, size // 2 - 1 : size // 2]).flatten(2, 3)

    D = from_middle(block)
    out = [((i // block == j // block) & (i >= j), D.exp2(), (-D).exp2())]
    while block < 32:
        x = (-from_middle(2 * block).abs()).exp2()
        out.append(((i // (2 * block) == j // (2 * block)) & (i // block > j // block), x, x))
        block *= 2
    return out


def _square(blocks: list[Tensor]) -> Tensor:
    """[64, 64] of (first half, second half, second with first)."""
    a, b, x = blocks
    return torch.cat([torch.cat([a, torch.zeros_like(a)], -1), torch.cat([x, b], -1)], -2)


def _inverse(L: Tensor, rounding: Rounding) -> Tensor:
    """(I + L)^-1 as invert_kernel forms it."""
    half = torch.float16
    i = torch.arange(64, device=L.device)[:, None]
    j = i.T
    M = torch.eye(64, dtype=L.dtype, device=L.device) - torch.where(i // 2 == j // 2, L, 0.0)
    for level in range(1, 6):
        pair = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) > (j >> level))
        corner, low = rounding(torch.where(pair, L, 0.0), half), rounding(M, half)
        if level < 4:
            M = M - rounding(low @ corner, half) @ low
        else:
            M = low - low @ rounding(corner @ low, half)
    return M


def chunked_passes(
    x: dict[str, Tensor], of_o: Tensor, of_state: Tensor, bound: float | None, block: int, rounding: Rounding
) -> dict[str, Tensor]:
    """One sequence: q, k [T, HV, K] and so on without a batch, initial_state [HV, K, V] (may be absent), the gradients of o
    and of the final state; all fp64.  Heads come first in the results: dA_log [HV], dbeta [HV, T], dz [HV, T, K]."""
    T, HV, K = x["q"].shape
    r: Callable[[Tensor], Tensor] = lambda t: rounding(t, torch.bfloat16)  # noqa: E731
    scale, rate = K**-0.5, x["A_log"].exp().view(HV, 1, 1, 1)
    q, k = (_chunks(x[n] * (x[n].square().sum(-1, keepdim=True) + 1e-6).rsqrt()) for n in ("q", "k"))
    v, shifted, do = _chunks(x["v"]), _chunks(x["z"] + x["dt_bias"]), _chunks(of_o)
    n = v.shape[1]
    live = (torch.arange(n * 64, device=q.device) < T).view(1, n, 64, 1)
    beta = _chunks(x["beta"].unsqueeze(-1)).sigmoid() * live
    if bound is None:
        g = (-rate * torch.nn.functional.softplus(shifted) * LOG2E).clamp_min(-24.0) * live
    else:
        g = bound * LOG2E * torch.sigmoid(rate * shifted) * live

    # prep: decayed operands, A, L, M
    half = slice(0, 32), slice(32, 64)
    G = [g[:, :, h].cumsum(2) for h in half]
    end = [t[:, :, -1:] for t in G]
    first, last = [t.exp2() for t in G], [(e - t).exp2() for e, t in zip(end, G)]
    qs, ks = [q[:, :, h] for h in half], [k[:, :, h] for h in half]
    factors = [_blocks(t, block) for t in G]
    A, L, rows, keys = [], [], [], []
    for h in range(2):
        keys.append([r(ks[h] * down) for _, _, down in factors[h]])
        rows.append([r(ks[h] * up) if up is not down else key for (_, up, down), key in zip(factors[h], keys[h])])
        blocks = list(zip(factors[h], rows[h], keys[h]))
        A.append(sum(torch.where(m, r(qs[h] * (scale * up)) @ key.mT, 0.0) for (m, up, _), _, key in blocks))
        L.append(sum(torch.where(m, row @ key.mT, 0.0) for (m, _, _), row, key in blocks).tril(-1))
    ends, across = r(ks[0] * last[0]), r(ks[1] * first[1])
    A.append(r(qs[1] * (scale * first[1])) @ ends.mT)
    L.append(across @ ends.mT)
    A = _square([r(t) for t in A])
    M = r(_inverse(beta * _square([rounding(t, torch.float16) for t in L]), rounding))
    before, after = end[0].exp2(), end[1].exp2()
    start, finish = [first[0], first[1] * before], [last[0] * after, last[1]]
    Qp, Kp, Kb = (
        r(torch.cat([a[h] * factor[h] for h in range(2)], 2))
        for a, factor in (([scale * t for t in qs], start), (ks, start), (ks, finish))
    )
    gamma = (before * after).mT

    # state and reverse
    S = x.get("initial_state", torch.zeros(HV, K, v.shape[-1], dtype=v.dtype, device=v.device))
    states, values = [], []
    for c in range(n):
        states.append(r(S))
        values.append(r(M[:, c] @ r((v[:, c] - Kp[:, c] @ states[c]) * beta[:, c])))
        S = S * gamma[:, c] + Kb[:, c].mT @ values[c]
    dS, dstates, Ys = of_state, [], []
    for c in reversed(range(n)):
        dstates.insert(0, r(dS))
        Y = M[:, c].mT @ r(Kb[:, c] @ dstates[0] + A[:, c].mT @ do[:, c])
        dS = dS * gamma[:, c] + Qp[:, c].mT @ do[:, c] + Kp[:, c].mT @ r(-beta[:, c] * Y)
        Ys.insert(0, r(Y))
    h, Vn, dh, Y = (torch.stack(t, 1) for t in (states, values, dstates, Ys))

    # vside
    dA, dL = r((do @ Vn.mT * scale).tril(-1)), r((Y @ Vn.mT * -beta).tril(-1))
    P0, P1, P2 = r(do @ h.mT * scale), r(Y @ h.mT * -beta), r(Vn @ dh.mT)
    w = (h * dh).sum(-1).unsqueeze(2) * gamma.mT

    # kside: the gradient of G, both sides of a pair from the same rounded operands
    dG = [qs[h] * (P0[:, :, half[h]] * start[h]) + ks[h] * (P1[:, :, half[h]] * start[h]) for h in range(2)]
    for h in range(2):
        for (m, up, _), row, key in zip(factors[h], rows[h], keys[h]):
            a, l = (torch.where(m, t[:, :, half[h], half[h]], 0.0) for t in (dA, dL))
            query = r(qs[h] * up)
            dG[h] = dG[h] + (a @ key) * query + (l @ key) * row - (a.mT @ query + l.mT @ row) * key
    a, l, query = dA[:, :, 32:, :32], dL[:, :, 32:, :32], r(qs[1] * first[1])
    dG[1] = dG[1] + (a @ ends) * query + (l @ ends) * across
    dG[0] = dG[0] - (a.mT @ query + l.mT @ across) * ends
    joined = torch.cat(dG, 2)
    kd = k * torch.cat(finish, 2) * P2
    dg = joined.flip(2).cumsum(2).flip(2) + w + kd.cumsum(2) - kd
    if bound is None:
        alive = live & (g > -24.0)
        dz, terms = torch.where(alive, dg * -rate * shifted.sigmoid(), 0.0), torch.where(alive, dg * g / LOG2E, 0.0)
    else:
        s = g / (bound * LOG2E)
        dz = dg * ((s - s * s) * bound * rate)
        terms = dz * shifted
    dbeta = r((1 - beta) * (Y * Vn).sum(-1, keepdim=True))
    return {
        "dA_log": terms.sum((1, 2, 3)),
        "dbeta": dbeta.flatten(1)[:, :T],
        "dz": dz.flatten(1, 2)[:, :T],
    }


def sequences(
    x: dict[str, Tensor], of_o: Tensor, of_state: Tensor, cu_seqlens: Tensor | None
) -> list[tuple[dict[str, Tensor], Tensor, Tensor]]:
    """The arguments of `chunked_passes` for every sequence of a batch or of a packed stream, in fp64; heads repeated."""
    B, T, H = x["q"].shape[:3]
    flat = {n: t.detach().double().flatten(0, 1) for n, t in x.items() if n in ("q", "k", "v", "z", "beta")}
    for n in ("q", "k"):
        flat[n] = flat[n].repeat_interleave(x["v"].shape[2] // H, 1)
    bounds = [T * b for b in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    out = []
    for s, (begin, end) in enumerate(zip(bounds, bounds[1:])):
        one = {n: t[begin:end] for n, t in flat.items()}
        one |= {n: x[n].detach().double() for n in ("A_log", "dt_bias")}
        if "initial_state" in x:
            one["initial_state"] = x["initial_state"][s].detach().double()
        if end > begin:
            out.append((one, of_o.double().flatten(0, 1)[begin:end], of_state[s].double()))
    return out


def predicted_errors(
    x: dict[str, Tensor],
    of_o: Tensor,
    of_state: Tensor,
    bound: float | None,
    block: int,
    cu_seqlens: Tensor | None = None,
    probes: int = 4,
) -> tuple[Tensor, float]:
    """Standard deviation of dA_log [HV], and root of the expected square of |error of dbeta|, from rounding.

    The second is the mean over random signs w of the variance of sum_t w_t dbeta_t."""
    variance = x["A_log"].new_zeros(x["A_log"].shape, dtype=torch.float64)
    square = torch.zeros_like(variance)
    generator = torch.Generator().manual_seed(2)
    for one, do, dS in sequences(x, of_o, of_state, cu_seqlens):
        taps = Taps()
        results = chunked_passes(one, do, dS, bound, block, taps)
        variance += taps.variance(results["dA_log"])
        for _ in range(probes):
            signs = torch.randint(0, 2, results["dbeta"].shape, generator=generator) * 2 - 1
            square += taps.variance(results["dbeta"] * signs.to(results["dbeta"])) / probes
    return variance.sqrt(), square.sum().sqrt().item()
