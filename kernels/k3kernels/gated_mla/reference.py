"""Keys, values and the output gate of Gated MLA in plain torch, differentiable by autograd."""

import torch
from torch import Tensor


def assemble_keys_torch(kv: Tensor, shared: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
    """kv [T, H, nope + v], shared [T, s] -> k [T, H, nope + s], v [T, H, v], which is a view of kv."""
    k, v = kv.split([nope_dim, kv.shape[-1] - nope_dim], dim=-1)
    return torch.cat([k, shared[:, None].expand(-1, kv.shape[1], -1)], dim=-1), v


def sigmoid_gate_torch(o: Tensor, gate: Tensor) -> Tensor:
    """o, gate [..., C] -> [..., C] in the gate's dtype."""
    return (o * torch.sigmoid(gate)).to(gate.dtype)
