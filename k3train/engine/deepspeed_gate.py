"""A gate between ZeRO's gradient norm and its update: gradients that cannot be trusted change nothing, on any rank."""

from __future__ import annotations

import math
from typing import Any


class NormGate:
    """Stands inside the step of a ZeRO optimizer, which measures the norm, clips, and then applies the update.

    limit: the largest gradient norm that is let through. scale: what ZeRO's gradients are still too large by when it
    measures them, its loss scale. norm, refused: of the last step, without the scale. A refused norm is shown to
    ZeRO as the one it never accepts (infinite), so that it leaves by its own way out: no update, gradients cleared. The
    norm is the same on every rank, and so is the decision.
    """

    def __init__(self, optimizer: Any, stage: int) -> None:
        self.limit, self.norm, self.refused, self.scale = math.inf, math.nan, False, 1.0
        if stage == 3:
            self._measure = optimizer._get_norm_groups
            optimizer._get_norm_groups = self._groups
            return
        self._measure = optimizer.scaled_global_norm
        optimizer.scaled_global_norm = self._whole
        # the norm tells what a search for infinities would; the flag alone makes ZeRO mind it in every dtype
        optimizer.check_grad_overflow = True
        optimizer.check_overflow = lambda **_: None

    def _judge(self, norm: float) -> None:
        self.norm = norm / self.scale
        self.refused = not (math.isfinite(self.norm) and self.norm <= self.limit)

    def _groups(self) -> list[Any]:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        groups = self._measure()
        self._judge(float(combine_grad_norm_groups(groups)))
        return [g * math.inf for g in groups] if self.refused else groups

    def _whole(self, norm_type: int = 2) -> Any:
        norm = self._measure(norm_type)
        self._judge(float(norm))
        return norm * math.inf if self.refused else norm
