"""A gate between the gradient norm and the update: gradients that cannot be trusted change nothing, on any rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads

INCOMPLETE = 2
"""What a rank says whose gradients lack something; 1 is a refusal."""


class UpdateGate:
    """Stands inside the step of a megatron optimizer, which measures the norm and then applies the update.

    sums: of this step, on the device: its loss, which must be finite, and the tokens that it counts. They are read after the
    norm, so that a step waits for the device once. Up to here gradients are those of the sum over the tokens; the norm is
    that of the mean, and one pass over the gradients, just before the update, divides and clips.

    clip: the norm that larger gradients are brought down to; 0 leaves them. limit: the largest gradient norm that is let
    through. norm: that of the last step. One small all-reduce a step makes the ranks agree, whatever norms their own
    optimizers see.

    incomplete: asked at the same time, whether this rank's gradients lack something; `again` then says on all ranks that
    nothing was applied for that reason, whatever the norm and the loss were.
    """

    def __init__(self, optimizer: Any, device: torch.device, sums: torch.Tensor, clip: float) -> None:
        self.limit, self.norm, self.device, self.sums, self.clip = math.inf, math.nan, device, sums, clip
        self._loss, self._tokens = math.nan, 1.0
        self._parts = getattr(optimizer, "chained_optimizers", [optimizer])
        self.incomplete: Callable[[], bool] | None = None
        self.again = False
        self._measure, self._apply = optimizer.get_grad_norm, optimizer.step_with_ready_grads
        optimizer.get_grad_norm = self._measured
        optimizer.step_with_ready_grads = self._gated

    def _measured(self) -> float:
        norm = float(self._measure())
        self._loss, tokens = self.sums[:2].tolist()
        self._tokens = max(tokens, 1.0)
        self.norm = norm / self._tokens
        return self.norm

    def _scale(self) -> None:
        """Gradients of the sum become those of the mean, clipped."""
        factor = 1.0 / self._tokens
        if self.clip > 0.0:
            factor *= min(1.0, self.clip / (self.norm + 1e-6))
        grads = [p.grad for part in self._parts for p in part.get_parameters() if p.grad is not None]
        if grads and factor != 1.0:
            overflow = torch.zeros(1, dtype=torch.int32, device=self.device)
            clip_grads.multi_tensor_applier(clip_grads.multi_tensor_scale_impl, overflow, [grads, grads], factor)

    def _gated(self) -> bool:
        finite = math.isfinite(self.norm) and math.isfinite(self._loss)
        code = int(not (finite and self.norm <= self.limit))
        if self.incomplete is not None and self.incomplete():
            code = INCOMPLETE
        if dist.get_world_size() > 1:
            flag = torch.tensor([code], dtype=torch.int32, device=self.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            code = int(flag.item())
        self.again = code == INCOMPLETE
        if code:
            return False
        self._scale()
        return self._apply()
