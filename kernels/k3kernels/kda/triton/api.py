"""Buffers, launches and autograd around the KDA kernels."""

from typing import Any

import torch
from torch import Tensor

from . import slices
from .passes import reverse_pass, state_pass
from .plan import Problem, plan
from .stages import Inputs, KeyGradients, Saved, empty, kside, prep, vside


def _rows(x: Tensor, aligned: bool) -> Tensor:
    """x itself if the kernels can read it in place, else a copy.  All of them want channels next to each other; the
    explicit-layout kernels also 16-byte copies and 32-bit offsets inside a chunk."""
    ok = x.stride(-1) == 1 or x.shape[-1] == 1
    if ok and aligned:
        ok = x.data_ptr() % 16 == 0 and x.stride(1) < 2**24 and all(s % 16 == 0 for s in x.stride()[:3])
    return x if ok else x.clone(memory_format=torch.contiguous_format)


def forward(
    p: Problem, x: Inputs, S0: Tensor | None, final: bool, save: bool
) -> tuple[Tensor, Tensor | None, Saved]:  # fmt: skip
    """o, the final state if wanted, and what the backward pass needs (h and V' only with save)."""
    s = Saved.new(p, x.q, save)
    o = empty(x.v, p.B, p.T, p.HV, p.V)
    if p.slices > 1:
        return o, slices.forward(p, x, s, o, S0, final, save), s
    prep(p, x, s)
    ST, s.moves = state_pass(p, s.tiles, x.v, (o, s.h, s.vn), S0, final, save)
    return o, ST, s


def backward(
    p: Problem, x: Inputs, o: Tensor, s: Saved, do: Tensor, dST: Tensor | None, want_dS0: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, z, beta, A_log, dt_bias and, if wanted, of the initial state."""
    n = max(p.tiles, 1)
    dv = empty(x.v, p.B, p.T, p.HV, p.V)
    db = empty(x.beta, p.B, p.T, p.HV)
    dS0: Tensor | None
    if p.slices > 1:
        out, dS0 = slices.backward(p, x, s, o, do, dST, dv, db)
    else:
        dS, Y = empty(x.q, n, p.V, p.K), empty(x.q, n, 64, p.V)
        dS0 = reverse_pass(p, s.tiles, do, (dS, Y), s.moves, dST, want_dS0)
        products = vside(p, x, o, do, s, dS, Y, dv, db)
        del dS, Y
        out = KeyGradients.new(p, x)
        kside(p, x, s, products, out)
    dq, dk = out.dq, out.dk
    if p.HV > p.H:
        dq, dk = (t.view(p.B, p.T, p.H, p.HV // p.H, p.K).sum(3).to(x.q.dtype) for t in (dq, dk))
    dA_log, dt_bias = out.pA.sum((0, 2)).to(x.A_log.dtype), out.pb.sum(0).to(x.dt_bias.dtype).view_as(x.dt_bias)
    return dq, dk, dv, out.dz, db, dA_log, dt_bias, dS0 if want_dS0 else None


class _KDA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, z, beta, A_log, dt_bias, S0, p: Problem, final: bool):  # type: ignore[no-untyped-def]
        save = any(ctx.needs_input_grad)
        o, ST, s = forward(p, Inputs(q, k, v, z, beta, A_log, dt_bias), S0, final, save)
        if save:
            ctx.p = p
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(q, k, v, z, beta, A_log, dt_bias, o, *s.tensors())
        return o, ST

    @staticmethod
    def backward(ctx: Any, do, dST):  # type: ignore[no-untyped-def]
        q, k, v, z, beta, A_log, dt_bias, o, *rest = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else _rows(do, ctx.p.config.hopper)
        dST = None if dST is None else dST.contiguous()
        x = Inputs(q, k, v, z, beta, A_log, dt_bias)
        g = backward(ctx.p, x, o, Saved(*rest), do, dST, ctx.needs_input_grad[7])
        return *g, None, None


def kda_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    bound: float | None = -5.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Chunked KDA; shapes, units and errors are those of `k3kernels.kda.kda`, which validates the arguments.

    q, k [B, T, H, K] and v [B, T, HV, V] share one dtype, bf16 or fp32.  Tensors are read in place whatever the strides
    of B, T and the heads; channels must lie next to each other (and rows start at multiples of 32 bytes for the
    explicit-layout kernels), else a copy is made.  Returns o [B, T, HV, V] and the final state
    fp32 [N, HV, K, V] or None.
    Never waits for the device; the same inputs give the same bits.
    """
    p = plan(q, v, z, bound, scale, cu_seqlens)
    fast = p.config.hopper
    q, k, v, z = _rows(q, fast), _rows(k, fast), _rows(v, fast), _rows(z, fast)
    S0 = None if initial_state is None else initial_state.contiguous()
    return _KDA.apply(q, k, v, z, beta, A_log.contiguous(), dt_bias.contiguous(), S0, p, output_final_state)
