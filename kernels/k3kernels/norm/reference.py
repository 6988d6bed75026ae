"""The gated RMS norm in plain torch: y = o / sqrt(mean o^2 + eps) * weight * sigmoid(gate).

Norm first, then gate, both in fp32, one rounding at the end (Kimi K3 report Eq. 6).
"""

from typing import Any

import torch
from torch import Tensor


def gated_rms_norm_naive(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula, differentiable by autograd; o, gate [..., V], weight [V]."""
    dtype = torch.float64 if o.dtype == torch.float64 else torch.float32
    x = o.to(dtype)
    x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return (x * weight.to(dtype) * torch.sigmoid(gate.to(dtype))).to(o.dtype)


class GatedRMSNorm(torch.autograd.Function):
    """The same with a hand-written backward, which needs half the passes over memory."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = torch.float64 if o.dtype == torch.float64 else torch.float32
        x = o.to(dtype)
        r = (torch.linalg.vecdot(x, x) / x.shape[-1] + eps).rsqrt_().unsqueeze(-1)
        s = torch.sigmoid(gate.to(dtype))
        y = (x * r).mul_(s).mul_(weight.to(dtype))
        ctx.save_for_backward(o, r, s, weight)
        ctx.gate_dtype = gate.dtype
        return y.to(o.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        o, r, s, weight = ctx.saved_tensors
        normed = o.to(r.dtype) * r
        w = weight.to(r.dtype)
        dys = dy.to(r.dtype) * s
        dyn = dys * normed
        dweight = dyn.reshape(-1, dyn.shape[-1]).sum(0)
        dgate = dyn.mul_(w).mul_(1 - s)
        dn = dys.mul_(w)
        mean = torch.linalg.vecdot(dn, normed).div_(dn.shape[-1]).unsqueeze(-1)
        do = dn.addcmul_(normed, mean, value=-1).mul_(r)
        return do.to(o.dtype), dgate.to(ctx.gate_dtype), dweight.to(weight.dtype), None


def gated_rms_norm_torch(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """o, gate [..., V], weight [V]."""
    return GatedRMSNorm.apply(o, gate, weight, eps)
