"""The torch optimizer that ZeRO divides: AdamW in groups of one dtype and one weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from k3train.config.schema import Config
from k3train.engine.megatron import UNIT_LR, has_weight_decay
from k3train.parallel.layout import Layout


def parameter_groups(config: Config, parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Groups by dtype and decay, none empty. fp32 comes first: ZeRO-1 and 2 take the dtype in which gradients are
    reduced from their first parameter, and then reduce those of bf16 weights in fp32 too."""
    groups = []
    dtypes = sorted({p.dtype for p in parameters.values()}, key=lambda d: d != torch.float32)
    for dtype in dtypes:
        for decay in (True, False):
            members = [p for p in parameters.values() if p.dtype == dtype and has_weight_decay(p) == decay]
            if members:
                groups.append({"params": members, "weight_decay": config.optim.weight_decay if decay else 0.0})
    return groups


def build_optimizer(
    config: Config, parameters: dict[str, nn.Parameter], layout: Layout, device: torch.device
) -> torch.optim.Optimizer:
    """torch's AdamW; its fused kernel on a GPU and, on a CPU, for state that is offloaded there."""
    optim = config.optim
    return torch.optim.AdamW(
        parameter_groups(config, parameters), lr=UNIT_LR, betas=(optim.beta1, optim.beta2), eps=optim.eps,
        fused=True if device.type == "cuda" else None,
    )  # fmt: skip
