"""The comparison arm of benchmarks/step.py: the same model as a user would write it in plain PyTorch.

Same shapes, parameters, data, optimizer and fp32 places; torch's linears, eager norms, gated units, mixes over depth
(with the memory-saving backward) and sigmoid routing, torch's flash attention for packed documents, torch's `grouped_mm`
with its own backward for the experts after a sort, whole logits with torch's cross entropy. Of fla-core, where it is
installed, what its own layer of KDA is made of: `chunk_kda` on its tensor-core path, `causal_conv1d` and the gated norm;
elsewhere this project's in their torch form (`replacements(kda="torch")`, for comparisons on a CPU).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Replacement = tuple[Any, str, Any]
"""A module, a name in it, and what stands there instead."""


def install() -> str:
    """Replace the project's fused parts for the rest of this process; returns which KDA runs."""
    try:
        import fla.ops.kda  # noqa: F401
    except ImportError:
        kind, said = "", "this project's KDA (fla-core is not installed: this is not the comparison)"
    else:
        kind, said = "fla", "fla-core's chunk_kda, causal_conv1d and gated norm"
    for module, name, value in replacements(kind):
        getattr(module, name)  # a name that has gone must not go unnoticed
        setattr(module, name, value)
    return said


@contextmanager
def replaced(kda: str) -> Iterator[None]:
    """`replacements` while inside."""
    before = [(module, name, getattr(module, name)) for module, name, _ in replacements(kda)]
    try:
        for module, name, value in replacements(kda):
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def replacements(kda: str) -> list[Replacement]:
    """What plain PyTorch puts in the place of the project's kernels. kda: fla, torch, or empty for the project's own."""
    from k3kernels import routing
    from k3kernels.norm.layer import layer_rms_norm_torch
    from k3kernels.routing import ops
    from k3train.model import attention_residuals, head, k3, latent_moe, mlp, recompute
    from k3train.model import kda as layer
    from k3train.model.backend import local

    made: list[Replacement] = [
        (module, "uses_kernels", lambda _: False) for module in (attention_residuals, k3, recompute)
    ]
    made += [(module, "gated_activation", gated_activation) for module in (latent_moe, mlp)]
    made += [
        (ops, "pick_backend", lambda *_: "torch"),
        (routing, "product_fp32", lambda x, weight: F.linear(x.float(), weight.float())),
        (head, "linear_cross_entropy", whole_logits),
        (local, "layer_rms_norm", lambda x, weight, *, eps: layer_rms_norm_torch(x, weight, eps)),
        (local, "GroupedLinear", GroupedLinear),
    ]
    if kda == "fla":
        return made + fla_parts(layer)
    if kda == "torch":
        return made + torch_parts(layer)
    return made


def gated_activation(model: Any, gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Tensor:
    """The gated unit of `k3train.model.situ`, eager on every device."""
    from k3train.model.situ import situ_glu

    if model.activation == "situ":
        out = situ_glu(gate, up, model.situ_beta, model.situ_linear_beta)
    else:
        out = F.silu(gate) * up
    return out if scale is None else (out.float() * scale[:, None]).to(out.dtype)


def whole_logits(hidden: Tensor, weight: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """Cross entropy fp32 [T] of every token, over all logits at once."""
    return F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="none")


class GroupedLinear:
    """torch's grouped product with torch's own gradients."""

    @staticmethod
    def apply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def fla_parts(layer: Any) -> list[Replacement]:
    """What fla-core's layer of KDA is made of."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.fused_norm_gate import rms_norm_gated
    from fla.ops.kda import chunk_kda

    sys.path.insert(0, str(Path(__file__).parent))
    from kda import tune_in_parallel

    tune_in_parallel()

    def kda(q: Any, k: Any, v: Any, z: Any, beta: Any, a_log: Any, dt_bias: Any, *, cu_seqlens: Any, **_: Any) -> Any:
        return chunk_kda(
            q, k, v, z, beta, A_log=a_log, dt_bias=dt_bias.flatten(), cu_seqlens=cu_seqlens, safe_gate=True,
            lower_bound=-5.0, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip

    def convolve(q: Any, k: Any, v: Any, *weights: Any, cu_seqlens: Any) -> Any:
        inputs = zip((q, k, v), weights)
        return *(causal_conv1d(x, w, activation="silu", cu_seqlens=cu_seqlens)[0] for x, w in inputs), None

    def normed(out: Any, gate: Any, weight: Any, *, eps: float) -> Any:
        return rms_norm_gated(out, gate, weight, None, activation="sigmoid", eps=eps)

    return [(layer, "kda", kda), (layer, "short_convolution_qkv", convolve), (layer, "gated_rms_norm", normed)]


def torch_parts(layer: Any) -> list[Replacement]:
    """The same three parts in plain torch operations: slow, and on every device."""
    from k3kernels.kda import kda as project_kda

    def kda(*tensors: Any, cu_seqlens: Any, bound: Any, output_final_state: bool = False, **_: Any) -> Any:
        return project_kda(
            *tensors, bound=bound, cu_seqlens=cu_seqlens, output_final_state=output_final_state, backend="naive"
        )

    def convolve(q: Any, k: Any, v: Any, *weights: Any, cu_seqlens: Any) -> Any:
        made = []
        for x, weight in zip((q, k, v), weights):
            bounds = cu_seqlens.tolist()
            pieces = [
                F.conv1d(
                    F.pad(x[0, a:b].t().to(weight.dtype), (weight.shape[1] - 1, 0))[None], weight[:, None],
                    groups=weight.shape[0],
                )[0].t()
                for a, b in zip(bounds, bounds[1:])
                if b > a
            ]  # fmt: skip
            made.append(F.silu(torch.cat(pieces))[None].to(x.dtype))
        return *made, None

    def normed(out: Any, gate: Any, weight: Any, *, eps: float) -> Any:
        wide = out.float()
        rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * rms * weight * torch.sigmoid(gate.float())).to(out.dtype)

    return [(layer, "kda", kda), (layer, "short_convolution_qkv", convolve), (layer, "gated_rms_norm", normed)]
