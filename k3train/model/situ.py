"""SiTU-GLU (report equation 12): a gated unit whose two branches saturate, so |output| <= beta * linear_beta."""

from __future__ import annotations

import torch

from k3train.config.schema import ModelConfig


def situ_glu(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    """[beta tanh(gate/beta) sigmoid(gate)] * [linear_beta tanh(up/linear_beta)], in fp32, cast back. Shapes alike.

    linear_beta None leaves the up branch unbounded.
    """
    g, u = gate.float(), up.float()
    bounded = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * bounded).to(gate.dtype)


def gated_activation(model: ModelConfig, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The model's gated unit: SiTU-GLU, or SwiGLU for Kimi Linear and the ablation."""
    if model.activation == "situ":
        return situ_glu(gate, up, model.situ_beta, model.situ_linear_beta)
    return torch.nn.functional.silu(gate) * up
