"""The parts that inference builds a model of: torch's products, norms in one kernel, projections of one input joined."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from k3kernels.few_rows import few_rows_linear
from k3kernels.norm.rms import rms_norm
from k3train.model.backend.local import RMSNorm
from k3train.model.backend.torch_gpu import TorchBackend
from k3train.model.gated_mla import GatedMLA
from k3train.model.kda import KDA

FEW = 4  # mean rows an expert up to which the product's time is that of the launch and of reading the experts in use


class InferenceNorm(RMSNorm):
    """`RMSNorm` as one kernel on a GPU. x [N, width]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or not x.is_cuda:
            return super().forward(x)
        return rms_norm(x, self.weight, eps=self.eps)


@dataclass
class Joined:
    """Projections of one input as one product: weight [sum of outputs, in], of which the parameters are slices."""

    weight: torch.Tensor
    sizes: list[int]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [N, in] -> what each projection gives, [N, out]."""
        return F.linear(x, self.weight).split(self.sizes, dim=-1)


@torch.no_grad()
def join(projections: list[nn.Module]) -> Joined:
    """Lay the weights of `projections` one after another in memory; each keeps its parameter, now a slice."""
    weights = [p.weight for p in projections]
    assert all(isinstance(w, nn.Parameter) for w in weights)
    whole = torch.cat([w.detach() for w in weights])  # type: ignore[union-attr, operator]
    sizes = [w.shape[0] for w in weights]  # type: ignore[union-attr, index]
    for weight, part in zip(weights, whole.split(sizes)):
        weight.data = part  # type: ignore[union-attr, assignment]
    return Joined(whole, sizes)


class InferenceBackend(TorchBackend):
    """The torch backend for a model that is read, on one device of any kind."""

    name = "inference"
    norm = InferenceNorm

    def __init__(self) -> None:
        self._borders: tuple[torch.Tensor, torch.Tensor] | None = None

    def finish(self, model: nn.Module) -> None:
        """Joins what a decode step multiplies with one input: `joined` of KDA and of MLA with low-rank queries."""
        for module in model.modules():
            if isinstance(module, KDA):
                full = module.ctx.model.kda.output_gate == "full"
                gate = module.g_proj if full else module.g_a_proj
                parts = [module.q_proj, module.k_proj, module.v_proj, gate, module.f_a_proj, module.b_proj]
                module.joined = join(parts)  # type: ignore[assignment]
            elif isinstance(module, GatedMLA) and module.ctx.model.mla.q_lora_rank is not None:
                gates = [module.g_proj] if module.ctx.model.mla.output_gate else []
                module.joined = join([module.q_a_proj, module.kv_a_proj, *gates])  # type: ignore[assignment]

    def grouped_linear(self, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """As the torch backend; a layer's three products come with the same `counts`, whose sums are kept."""
        if not (x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] > 0):
            return super().grouped_linear(x, weight, counts)
        if x.shape[0] <= FEW * weight.shape[0]:
            return few_rows_linear(x, weight, counts)
        if self._borders is None or self._borders[0] is not counts:
            self._borders = (counts, counts.cumsum(0, dtype=torch.int32))
        return F.grouped_mm(x, weight.transpose(1, 2), offs=self._borders[1])
