"""The chunked delta rule with per-channel decay, in matrix products of plain torch, with a hand-written backward.

Equations: Kimi K3 report Eq. 3-4 and Kimi Linear (arXiv 2510.26692) section 3; the backward forms are derived here.
For one chunk of C rows, G the inclusive cumulative log decay, s the scale, b = beta, S the state at the chunk's start:

    Q~ = s q e^G    K+ = k e^G    K^ = k e^(G_C - G)    gamma = e^(G_C)
    A  = tril(s q_i . k_j e^(G_i - G_j))      P = stril(k_i . k_j e^(G_i - G_j))      M = (I + diag(b) P)^-1
    V' = M diag(b) (V - K+ S)                 O = Q~ S + A V'                        S <- diag(gamma) S + K^^T V'

Only the last line's recurrence over chunks is sequential; everything else is one batched product over all chunks of all
documents and heads. e^(G_i - G_j) is never split into e^G e^-G over a chunk. It is split at the border between two
neighbouring groups of h rows, h = C/2, C/4, ..., where both exponents are sums of log decays and so never positive.
The halving goes down to one row when the gate is unbounded; with a bound it stops at tiles of 16 rows, where
e^(-8 |bound|) ... e^(8 |bound|) fits fp32, and one product does the tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3kernels.kda.chunk_plan import ChunkPlan

TILE = 16


@dataclass
class Decays:
    """Decay factors of a chunk list; X = chunks * HV.

    prefix = e^G and suffix = e^(G_C - G), [X, C, K]; levels: (h, e^(rows), e^(keys)), each [X, C/2h, h, K], for pairs
    across the middle of each group of 2h rows; tile: the factors inside tiles of 16 rows, or None.
    """

    prefix: Tensor
    suffix: Tensor
    levels: list[tuple[int, Tensor, Tensor]]
    tile: tuple[Tensor, Tensor] | None

    def pack(self) -> list[Tensor]:
        """All tensors in one list, so that autograd's saved-tensor hooks (checkpointing, offload) see them."""
        return [self.prefix, self.suffix, *(self.tile or ()), *(x for _, row, key in self.levels for x in (row, key))]

    @classmethod
    def unpack(cls, tensors: Sequence[Tensor], tiled: bool) -> "Decays":
        rest = tensors[4 if tiled else 2 :]
        levels = [(row.shape[2], row, key) for row, key in zip(rest[0::2], rest[1::2])]
        return cls(tensors[0], tensors[1], levels, (tensors[2], tensors[3]) if tiled else None)


def decay_factors(g: Tensor, bound: float | None) -> Decays:
    """All decay factors from the log decays g [X, C, K]; g must stay within [bound, 0] when a bound is given."""
    X, C, K = g.shape
    tile = None
    if bound is None:
        h, prefix, suffix = 1, g.unsqueeze(2), torch.zeros_like(g).unsqueeze(2)
    else:
        h = TILE
        prefix = g.view(X, C // h, h, K).cumsum(2)
        suffix = prefix[:, :, -1:] - prefix
        # Centring the range does not depend on the data, so that no row ever depends on a later gate.
        centred = prefix - 0.5 * h * bound
        tile = (centred.exp(), (-centred).exp())
    levels = []
    while h < C:
        # prefix: sum from the group's start to the row; suffix: from after the row to the group's end.
        prefix, suffix = (x.view(X, C // (2 * h), 2, h, K) for x in (prefix, suffix))
        levels.append((h, prefix[:, :, 1].exp(), suffix[:, :, 0].exp()))
        first_total, second_total = prefix[:, :, 0, -1:], prefix[:, :, 1, -1:]
        prefix = torch.cat([prefix[:, :, 0], prefix[:, :, 1] + first_total], 2)
        suffix = torch.cat([suffix[:, :, 0] + second_total, suffix[:, :, 1]], 2)
        h *= 2
    return Decays(prefix.reshape(X, C, K).exp(), suffix.reshape(X, C, K).exp(), levels, tile)


def _halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """First and second half of each group of 2h rows: two views [X, C/2h, h, D] of x [X, C, D]."""
    x = x.view(x.shape[0], x.shape[1] // (2 * h), 2, h, x.shape[2])
    return x[:, :, 0], x[:, :, 1]


def _corners(x: Tensor, h: int) -> Tensor:
    """The lower left h x h corners of the diagonal blocks of size 2h: a view [X, C/2h, h, h] of x [X, C, C]."""
    X, C = x.shape[:2]
    blocks = x.view(X, C // (2 * h), 2 * h, C // (2 * h), 2 * h).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    return blocks[:, :, h:, :h]


def _tiles(x: Tensor) -> Tensor:
    """The diagonal tiles: a view [X, C/16, 16, 16] of x [X, C, C]."""
    X, C = x.shape[:2]
    return x.view(X, C // TILE, TILE, C // TILE, TILE).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def decayed_products(q: Tensor, k: Tensor, decays: Decays) -> tuple[Tensor, Tensor]:
    """Strictly lower q_i . k_j e^(G_i - G_j) and k_i . k_j e^(G_i - G_j), both [X, C, C]."""
    X, C, K = q.shape
    if decays.tile is not None and C == TILE:
        row, key = (x.view(X, C, K) for x in decays.tile)
        keys = (k * key).mT
        return torch.tril(q * row @ keys, -1), torch.tril(k * row @ keys, -1)
    qk, kk = q.new_zeros(X, C, C), q.new_zeros(X, C, C)
    if decays.tile is not None:
        row, key = decays.tile
        tiled = (X, C // TILE, TILE, K)
        keys = (k.view(tiled) * key).mT
        # tril writes zeros above the diagonal; a product with a mask would turn an overflow there into NaN.
        _tiles(qk).copy_(torch.tril(q.view(tiled) * row @ keys, -1))
        _tiles(kk).copy_(torch.tril(k.view(tiled) * row @ keys, -1))
    for h, row, key in decays.levels:
        k_first, k_second = _halves(k, h)
        keys = (k_first * key).mT
        _corners(qk, h).copy_(_halves(q, h)[1] * row @ keys)
        _corners(kk, h).copy_(k_second * row @ keys)
    return qk, kk


def decayed_products_backward(
    dqk: Tensor, dkk: Tensor, q: Tensor, k: Tensor, decays: Decays
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk as rows, dk as keys of `decayed_products`; dqk, dkk [X, C, C] are read below the diagonal."""
    X, C, K = q.shape
    if decays.tile is not None:
        row, key = decays.tile
        tiled = (X, C // TILE, TILE, K)
        keys = k.view(tiled) * key
        a, e = torch.tril(_tiles(dqk), -1), torch.tril(_tiles(dkk), -1)
        dq = (a @ keys * row).view(X, C, K)
        dk_row = (e @ keys * row).view(X, C, K)
        dk_key = ((a.mT @ (q.view(tiled) * row) + e.mT @ (k.view(tiled) * row)) * key).view(X, C, K)
    else:
        dq, dk_row, dk_key = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(q)
    for h, row, key in decays.levels:
        k_first, k_second = _halves(k, h)
        keys = k_first * key
        a, e = _corners(dqk, h), _corners(dkk, h)
        _halves(dq, h)[1].addcmul_(a @ keys, row)
        _halves(dk_row, h)[1].addcmul_(e @ keys, row)
        _halves(dk_key, h)[0].addcmul_(a.mT @ (_halves(q, h)[1] * row) + e.mT @ (k_second * row), key)
    return dq, dk_row, dk_key


def unit_lower_inverse(L: Tensor) -> Tensor:
    """(I + L)^-1 for strictly lower L [X, C, C]: tiles of 16 by substitution, then merged by block doubling.

    Every intermediate is itself an inverse, so repeated keys with beta near 1 do no harm (a power series would).
    """
    X, C, _ = L.shape
    h = min(C, TILE)
    eye = torch.eye(h, dtype=L.dtype, device=L.device)
    if h == C:
        return torch.linalg.solve_triangular(L, eye.expand(X, C, C), upper=False, unitriangular=True)
    M = torch.zeros_like(L)
    inverses = torch.linalg.solve_triangular(
        _tiles(L).contiguous(), eye.expand(X, C // h, h, h), upper=False, unitriangular=True
    )
    _tiles(M).copy_(inverses)
    while h < C:
        first, second = inverses[:, 0::2], inverses[:, 1::2]
        corner = -(second @ _corners(L, h) @ first)
        _corners(M, h).copy_(corner)
        h *= 2
        if h < C:
            inverses = M.view(X, C // h, h, C // h, h).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).contiguous()
    return M


def _suffix_sum(x: Tensor) -> Tensor:
    """Sum from each row to the chunk's last, along dimension -2."""
    return x.flip(-2).cumsum(-2).flip(-2)


class ChunkedRecurrence(torch.autograd.Function):
    """The recurrence on flat streams: q, k [T,H,K] normalised; v [T,HV,V]; g [T,HV,K]; beta [T,HV]; state [N,HV,K,V].

    All of one dtype (fp32, or fp64 for checks). Returns o [T,HV,V] and the final states [N,HV,K,V].
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        scale: float,
        bound: float | None,
        plan: ChunkPlan,
    ) -> tuple[Tensor, Tensor]:
        T, H, K = q.shape
        HV, V = v.shape[1:]
        X = plan.chunks * HV
        state_shape = (plan.documents, HV, K, V)
        ctx.shapes, ctx.scale, ctx.plan, ctx.has_state = (T, H, HV, K, V), scale, plan, initial_state is not None
        if plan.chunks == 0:
            ctx.save_for_backward()
            final = q.new_zeros(state_shape) if initial_state is None else initial_state.clone()
            return v.new_zeros(T, HV, V), final

        qc, kc, vc = plan.to_chunks(q, keys=True), plan.to_chunks(k, keys=True), plan.to_chunks(v)
        gc = plan.clear_padding(plan.to_chunks(g))
        bc = plan.clear_padding(plan.to_chunks(beta.unsqueeze(-1)))

        decays = decay_factors(gc, bound)
        A, P = decayed_products(qc, kc, decays)
        A.diagonal(dim1=1, dim2=2).copy_((qc * kc).sum(-1))
        A.mul_(scale)
        M = unit_lower_inverse(bc * P)
        W = M @ (bc * kc * decays.prefix)  # V' = U - W S
        U = M @ (bc * vc)
        k_end = kc * decays.suffix
        gamma = decays.prefix[:, -1].unsqueeze(-1)  # [X, K, 1]

        S = q.new_zeros(plan.live * HV, K, V) if initial_state is None else plan.enter(initial_state)
        states = q.new_empty(X, K, V)
        ended = []
        for i, (begin, end) in enumerate(plan.steps):
            rows = slice(begin * HV, end * HV)
            states[rows] = S
            new_values = U[rows].baddbmm_(W[rows], S, alpha=-1)
            S = torch.baddbmm(gamma[rows] * S, k_end[rows].mT, new_values)
            remaining = plan.remaining(i) * HV
            ended.append(S[remaining:])
            S = S[:remaining]
        final = plan.leave(torch.cat(ended[::-1]), initial_state, state_shape)

        o = plan.to_stream(torch.baddbmm(A @ U, qc * decays.prefix, states, alpha=scale), HV, HV)
        ctx.tiled = decays.tile is not None
        ctx.save_for_backward(qc, kc, vc, bc, A, P, M, W, U, states, *decays.pack())
        return o, final

    @staticmethod
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        plan, scale = ctx.plan, ctx.scale
        T, H, HV, K, V = ctx.shapes
        if plan.chunks == 0:
            zeros = [do.new_zeros(T, heads, size) for heads, size in ((H, K), (H, K), (HV, V), (HV, K))]
            return *zeros, do.new_zeros(T, HV), dfinal if ctx.has_state else None, None, None, None
        qc, kc, vc, bc, A, P, M, W, U, states, *packed = ctx.saved_tensors  # U holds V' since the scan
        decays = Decays.unpack(packed, ctx.tiled)
        prefix, suffix = decays.prefix, decays.suffix
        gamma = prefix[:, -1].unsqueeze(-1)
        doc = plan.clear_padding(plan.to_chunks(do))

        # Reverse scan: dS_before = gamma dS + Q~^T dO - W^T (A^T dO + K^ dS).
        k_end = kc * suffix
        dvalues = A.mT @ doc
        source = torch.bmm((qc * prefix).mT, doc).mul_(scale).baddbmm_(W.mT, dvalues, alpha=-1)
        dended = plan.enter(dfinal)
        dstates = torch.empty_like(states)
        dS = dended[:0]
        for begin, end in reversed(plan.steps):
            rows = slice(begin * HV, end * HV)
            dS = torch.cat([dS, dended[dS.shape[0] : (end - begin) * HV]])
            dstates[rows] = dS
            dvalues_end = torch.bmm(k_end[rows], dS)
            dvalues[rows] += dvalues_end
            dS = (gamma[rows] * dS).add_(source[rows]).baddbmm_(W[rows].mT, dvalues_end, alpha=-1)
        dinitial = plan.leave(dS, dfinal, (plan.documents, HV, K, V)) if ctx.has_state else None

        Y = M.mT @ dvalues  # gradient of beta (V - K+ S)
        YS = Y @ states.mT
        dA = doc @ U.mT
        dA_diagonal = dA.diagonal(dim1=1, dim2=2).unsqueeze(-1) * scale
        dA.mul_(scale)
        dL = torch.tril(Y @ U.mT, -1).neg_()  # no product with M on both sides is needed
        dbeta = (Y * vc).sum(-1) - (kc * prefix * YS).sum(-1) + (dL * P).sum(-1)

        dq, dk_row, dk_key = decayed_products_backward(dA, dL.mul_(bc), qc, kc, decays)
        dq.addcmul_(doc @ states.mT, prefix, value=scale)
        dk_row.addcmul_(bc * YS, prefix, value=-1)
        dk_end = (U @ dstates.mT).mul_(suffix)
        # A row of G acts with its sign on each side; the diagonal of A does not depend on G and stays out.
        dG = (qc * dq).addcmul_(kc, dk_row - dk_key)
        dG[:, -1] += gamma.squeeze(-1) * (states * dstates).sum(-1)
        dg = _suffix_sum(dG)
        # Through e^(G_C - G_r), a gate sees the rows before it. Summed as such: G_C and G_r apart would cancel.
        dg[:, 1:] += (kc[:, :-1] * dk_end[:, :-1]).cumsum(1)
        dk_key.add_(dk_end)
        dk = dk_row.add_(dk_key).addcmul_(dA_diagonal, qc)
        dq.addcmul_(dA_diagonal, kc)

        return (
            plan.to_stream(dq, HV, H),
            plan.to_stream(dk, HV, H),
            plan.to_stream(Y.mul_(bc), HV, HV),
            plan.to_stream(dg, HV, HV),
            plan.to_stream(dbeta.unsqueeze(-1), HV, HV).squeeze(-1),
            dinitial,
            None,
            None,
            None,
        )
