"""SiTU-GLU (report equation 12): a gated unit whose two branches saturate, so |output| <= beta * linear_beta."""

from __future__ import annotations

import torch

from k3kernels.situ import situ_glu as situ_kernel
from k3train.config.schema import ModelConfig


def situ_glu(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    """[beta tanh(gate/beta) sigmoid(gate)] * [linear_beta tanh(up/linear_beta)], in fp32, cast back. Shapes alike.

    linear_beta None leaves the up branch unbounded.
    """
    g, u = gate.float(), up.float()
    bounded = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * bounded).to(gate.dtype)


def gated_activation(
    model: ModelConfig, gate: torch.Tensor, up: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """The model's gated unit: SiTU-GLU, or SwiGLU for Kimi Linear and the ablation. gate, up [N, h]; scale fp32 [N] or
    None multiplies rows. On a GPU SiTU-GLU is one kernel, its product with scale rounded once."""
    if model.activation == "situ":
        if gate.is_cuda and gate.dim() == 2 and gate.element_size() < 8:
            return situ_kernel(gate, up, beta=model.situ_beta, linear_beta=model.situ_linear_beta, scale=scale)
        out = situ_glu(gate, up, model.situ_beta, model.situ_linear_beta)
    else:
        out = torch.nn.functional.silu(gate) * up
    return out if scale is None else (out.float() * scale[:, None]).to(out.dtype)
