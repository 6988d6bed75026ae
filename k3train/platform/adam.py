"""AdamW in the shape that megatron's distributed optimizer expects of a fused one.

megatron-core reshards optimizer state only when the step count lives in the parameter group, as in transformer-engine's
and apex's FusedAdam; torch's AdamW keeps a step in every parameter's state and cannot be loaded under another layout.
`FusedAdam` is torch's AdamW with the count in the group: on a CPU the same operations in the same order, hence the same
bits as `AdamW(foreach=True)`; on a GPU the kernel of `AdamW(fused=True)`. `install_adam` puts it where megatron picks
its Adam when neither library is installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from k3train.platform.multi_tensor import install_multi_tensor


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled (AdamW) or classic weight decay.

    State of a parameter: `exp_avg`, `exp_avg_sq`, shaped and typed like it. State of a group: `step` (int).
    Loshchilov & Hutter, "Decoupled Weight Decay Regularization", algorithm 2.

    Raises ValueError for options that this class does not have.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        capturable: bool = False,
    ) -> None:
        if amsgrad or capturable:
            raise ValueError(
                f"FusedAdam has neither amsgrad nor capturable (got {amsgrad=}, {capturable=}); leave both False."
            )
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    def initialize_state(self, param: torch.Tensor) -> None:
        """Allocate the two moments of one parameter, as zeros."""
        self.state[param]["exp_avg"] = torch.zeros_like(param)
        self.state[param]["exp_avg_sq"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; a group without any still counts the step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None and p.numel() > 0]
            for p in params:
                if "exp_avg" not in self.state[p]:
                    self.initialize_state(p)
            by_dtype: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
            for p in params:
                by_dtype.setdefault((p.dtype, p.device), []).append(p)
            for same in by_dtype.values():
                self._update(group, same)
        return loss

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """One step for parameters of one dtype and device, as a few passes over all of them at once."""
        beta1, beta2 = group["betas"]
        lr, decay, step = group["lr"], group["weight_decay"], group["step"]
        grads = [p.grad for p in params if p.grad is not None]
        means = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]

        if params[0].is_cuda and self.adam_w_mode and group["bias_correction"]:  # the same in one pass over memory
            count = torch.full((), float(step), device=params[0].device)
            torch._fused_adamw_(
                params, grads, means, squares, [], [count] * len(params), lr=lr, beta1=beta1, beta2=beta2,
                weight_decay=decay, eps=group["eps"], amsgrad=False, maximize=False,
            )  # fmt: skip
            return
        if decay != 0:
            if self.adam_w_mode:
                torch._foreach_mul_(params, 1 - lr * decay)
            else:
                grads = list(torch._foreach_add(grads, params, alpha=decay))
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)

        correction1 = 1 - beta1**step if group["bias_correction"] else 1.0
        correction2 = 1 - beta2**step if group["bias_correction"] else 1.0
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, math.sqrt(correction2))
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_addcdiv_(params, means, roots, -lr / correction1)


def install_adam() -> bool:
    """Make megatron-core use `FusedAdam` when it found neither transformer-engine's nor apex's; idempotent.

    Call it after megatron is imported and before an optimizer is built, with or without a GPU.
    Returns True when FusedAdam is what megatron will use.
    """
    import megatron.core.optimizer as chosen
    from megatron.core.optimizer import distrib_optimizer as distributed

    install_multi_tensor()
    if chosen.USING_PYTORCH_OPTIMIZER:
        chosen.Adam = distributed.Adam = FusedAdam
        chosen.USING_PYTORCH_OPTIMIZER = False
        # "Apex" is megatron's name for "the step is in the group": it aligns the step of groups that a rank has empty.
        distributed.HAVE_APEX_OR_TE = True
        distributed.USING_APEX_OPTIMIZER = True
    return chosen.Adam is FusedAdam
