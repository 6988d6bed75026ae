"""SiTU-GLU in plain torch (Kimi K3 report equation 12), fp32 inside, one rounding."""

import torch
from torch import Tensor


def situ_glu_torch(gate: Tensor, up: Tensor, scale: Tensor | None, beta: float, linear_beta: float | None) -> Tensor:
    """[beta tanh(gate / beta) sigmoid(gate)] [linear_beta tanh(up / linear_beta)] scale; gate, up [N, h], scale [N]."""
    dtype = torch.float64 if gate.dtype == torch.float64 else torch.float32
    g, u = gate.to(dtype), up.to(dtype)
    bounded = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    y = beta * torch.tanh(g / beta) * torch.sigmoid(g) * bounded
    return (y if scale is None else y * scale.to(dtype)[:, None]).to(gate.dtype)
