"""A gate between the gradient norm and the update: gradients that cannot be trusted change nothing, on any rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

INCOMPLETE = 2
"""What a rank says whose gradients lack something; 1 is a refusal."""


class UpdateGate:
    """Stands inside the step of a megatron optimizer, which measures the norm, clips, and then applies the update.

    limit: the largest gradient norm that is let through. norm: that of the last step. loss: of this step, on the
    device, or None; it too must be finite. It is read after the norm, so that a step waits for the device once. One small
    all-reduce a step makes the ranks agree, whatever norms their own optimizers see.

    incomplete: asked at the same time, whether this rank's gradients lack something; `again` then says on all ranks that
    nothing was applied for that reason, whatever the norm and the loss were.
    """

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self.limit, self.norm, self.device = math.inf, math.nan, device
        self.loss: torch.Tensor | None = None
        self.incomplete: Callable[[], bool] | None = None
        self.again = False
        self._measure, self._apply = optimizer.get_grad_norm, optimizer.step_with_ready_grads
        optimizer.get_grad_norm = self._measured
        optimizer.step_with_ready_grads = self._gated

    def _measured(self) -> float:
        self.norm = float(self._measure())
        return self.norm

    def _gated(self) -> bool:
        finite = math.isfinite(self.norm) and (self.loss is None or math.isfinite(float(self.loss)))
        code = int(not (finite and self.norm <= self.limit))
        if self.incomplete is not None and self.incomplete():
            code = INCOMPLETE
        if dist.get_world_size() > 1:
            flag = torch.tensor([code], dtype=torch.int32, device=self.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            code = int(flag.item())
        self.again = code == INCOMPLETE
        return False if code else self._apply()
