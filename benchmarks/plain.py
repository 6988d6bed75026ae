"""The comparison arm of benchmarks/step.py: the same model as a user would write it in plain PyTorch.

Same shapes, parameters, data, optimizer and fp32 places; torch's linears, eager norms, gated units, mixes over depth
(with the memory-saving backward) and sigmoid routing, torch's flash attention for packed documents, `grouped_mm` for the
experts after a sort, whole logits with torch's cross entropy, and KDA of fla-core (`chunk_kda`, its tensor-core path)
where it is installed: else this project's KDA stands in, which makes the plain arm faster than it would be.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def install() -> str:
    """Replace the project's fused parts for the rest of this process; returns which KDA runs."""
    from k3kernels.routing import ops as routing
    from k3train.model import attention_residuals, head, k3, recompute, situ

    for module in (attention_residuals, k3, recompute):
        module.uses_kernels = lambda _: False  # type: ignore[attr-defined]
    routing.pick_backend = lambda *_: "torch"  # type: ignore[assignment]
    routing.product_fp32.__code__ = _fp32_product.__code__
    situ.gated_activation.__code__ = _gated.__code__

    def whole(hidden: Tensor, weight: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels, reduction="none")

    head.linear_cross_entropy = whole  # type: ignore[assignment]
    return _install_fla()


def _fp32_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x.float(), weight.float())


def _gated(model: Any, gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Tensor:
    if model.activation == "situ":
        out = situ_glu(gate, up, model.situ_beta, model.situ_linear_beta)  # noqa: F821  (the module's own)
    else:
        out = torch.nn.functional.silu(gate) * up
    return out if scale is None else (out.float() * scale[:, None]).to(out.dtype)


def _install_fla() -> str:
    try:
        from fla.ops.kda import chunk_kda
    except ImportError:
        return "this project's KDA (fla-core is not installed: not run)"
    sys.path.insert(0, str(Path(__file__).parent))
    from kda import tune_in_parallel

    from k3train.model import kda as layer

    tune_in_parallel()

    def kda(q: Any, k: Any, v: Any, z: Any, beta: Any, a_log: Any, dt_bias: Any, *, cu_seqlens: Any, **_: Any) -> Any:
        return chunk_kda(
            q, k, v, z, beta, A_log=a_log, dt_bias=dt_bias.flatten(), cu_seqlens=cu_seqlens, safe_gate=True,
            lower_bound=-5.0, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip

    layer.kda = kda  # type: ignore[assignment]
    return "fla-core's chunk_kda"
