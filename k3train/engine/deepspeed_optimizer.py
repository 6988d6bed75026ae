"""The torch optimizer that ZeRO divides: AdamW, or per-head Muon beside it, over flat pieces of the parameters.

ZeRO hands its optimizer flat stretches of fp32 weights, and Muon needs matrices. Momentum is a sum, so it is kept in
pieces like Adam's moments; the Nesterov update that it gives is gathered over the ranks, made into matrices again,
orthogonalised by the code of the other engine, and each rank applies its own stretch of the outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from k3train.config.schema import Config
from k3train.engine import deepspeed_state
from k3train.engine.megatron import UNIT_LR, has_weight_decay
from k3train.parallel.layout import Layout
from k3train.train.optimizer import PerHeadMuon, is_muon

if TYPE_CHECKING:
    from k3train.engine.deepspeed import DeepSpeedEngine


def parameter_groups(config: Config, parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Groups of one dtype, decay and optimizer ("muon": bool), none empty.

    fp32 comes first: ZeRO-1 and 2 take the dtype in which gradients are reduced from their first parameter, and then
    reduce those of bf16 weights in fp32 too.
    """
    optim = config.optim

    def kind(name: str, p: nn.Parameter) -> tuple[bool, bool, bool]:
        muon = optim.name == "muon" and is_muon(name, p.k3, optim.muon)  # type: ignore[attr-defined]
        return p.dtype != torch.float32, not has_weight_decay(p), muon

    members: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
    for name, p in parameters.items():
        members.setdefault(kind(name, p), []).append(p)
    return [
        {"params": members[key], "weight_decay": 0.0 if key[1] else optim.weight_decay, "muon": key[2]}
        for key in sorted(members)
    ]


def build_optimizer(
    config: Config, parameters: dict[str, nn.Parameter], layout: Layout, device: torch.device
) -> torch.optim.Optimizer:
    """torch's AdamW (fused with a GPU, where the fused kernel for CPU tensors serves state that is offloaded), or Muon."""
    optim = config.optim
    groups = parameter_groups(config, parameters)
    options: dict[str, Any] = {
        "lr": UNIT_LR, "betas": (optim.beta1, optim.beta2), "eps": optim.eps,
        "fused": True if device.type == "cuda" else None,
    }  # fmt: skip
    return ZeroMuon(groups, config, layout, options) if optim.name == "muon" else torch.optim.AdamW(groups, **options)


class ZeroMuon(torch.optim.AdamW):
    """AdamW, and Muon for the groups that say so. State of a flat piece under Muon: `momentum_buffer`, like the piece."""

    def __init__(self, groups: list[dict[str, Any]], config: Config, layout: Layout, options: dict[str, Any]) -> None:
        super().__init__(groups, **options)
        self.config, self.layout = config, layout
        self.engine: DeepSpeedEngine | None = None  # set once ZeRO has cut the parameters

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        every = self.param_groups
        self.param_groups = [g for g in every if not g["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = every
        for group in every:
            for flat in group["params"] if group["muon"] else ():
                if flat.grad is not None:
                    self._muon(flat, group["lr"], group["weight_decay"])

    def _muon(self, flat: Tensor, lr: float, weight_decay: float) -> None:
        assert self.engine is not None and flat.grad is not None
        momentum = self.config.optim.muon.momentum
        if "momentum_buffer" not in self.state[flat]:
            self.state[flat]["momentum_buffer"] = torch.zeros_like(flat)
        buffer = self.state[flat]["momentum_buffer"]
        buffer.mul_(momentum).add_(flat.grad)
        update = flat.grad.add(buffer, alpha=momentum)  # Nesterov
        moves = self._orthogonalised(deepspeed_state.whole(self.engine, flat, update))
        flat.mul_(1.0 - lr * weight_decay)
        for piece in deepspeed_state.pieces(self.engine):
            if piece.flat is flat:
                piece.fp32().add_(piece.slice_of(moves[piece.name]), alpha=lr)

    def _orthogonalised(self, updates: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the other engine's Muon makes of whole updates at a rate of one.

        It adds its own momentum, from zero: what it orthogonalises is (1 + momentum) times the gradient it is given.
        """
        assert self.engine is not None
        muon = self.config.optim.muon
        moves: dict[str, Tensor] = {}
        for name, update in updates.items():
            move = torch.zeros_like(update)
            move.k3 = self.engine.names[name].k3  # type: ignore[attr-defined]
            move.grad = update.div_(1.0 + muon.momentum)
            moves[name] = move
        if moves:
            # in stages 1 and 2 a rank orthogonalises what it holds; in 3 all hold parts of everything and share the work
            share = self.config.engine.zero_stage == 3
            PerHeadMuon(list(moves.values()), 1.0, 0.0, muon, self.layout, share_work=share).step()
        return moves
