"""megatron-core's norm and scale of all gradients, where neither transformer-engine nor apex is installed.

Its own stand-ins take the norm of every tensor by itself and read each on the host: hundreds of waits a step on a GPU.
These are a few launches over all tensors and read nothing.
"""

from __future__ import annotations

from typing import Any

import torch


def l2_norm(_chunk: int, _flag: Any, lists: list[list[torch.Tensor]], _per_tensor: bool = False, *_: Any) -> Any:
    """The L2 norm fp32 [1] of all tensors of the first list together; None, for the norms of each."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).float().reshape(1), None


def scale(_chunk: int, _flag: Any, lists: list[list[torch.Tensor]], factor: float) -> None:
    """The second list becomes the first times `factor`."""
    sources, targets = lists
    if all(a.data_ptr() == b.data_ptr() for a, b in zip(sources, targets)):
        torch._foreach_mul_(targets, factor)
    else:
        torch._foreach_copy_(targets, torch._foreach_mul(sources, factor))


def install_multi_tensor() -> None:
    """Use them on a GPU in place of megatron's stand-ins; idempotent, and nothing where a library has its own."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    if torch.cuda.is_available() and clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = l2_norm, scale
