"""Per-head Muon (report section 2.5): orthogonalised momentum for matrices, AdamW for everything else.

The momentum of the q, k, v projections is split by head and each block orthogonalised by itself; other matrices whole;
each expert matrix by itself. Newton-Schulz is emerging-optimizers', batched over equal shapes. An update has the root
mean square 0.2 whatever the shape: 0.2 sqrt(max(A, B)) times an orthogonal A x B matrix (Moonlight), with A x B the
block's shape or the whole matrix's (`optim.muon.scale`).

The same update under every layout: heads and experts are whole on a rank; a matrix cut over tensor ranks is gathered
for Newton-Schulz. Over data-parallel ranks, which hold equal momenta, each matrix is orthogonalised by one rank and
sent to the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3train.config.schema import MuonConfig
from k3train.model.parameters import ParameterSpec
from k3train.parallel.layout import Layout

NAME = "k3_muon"
UPDATE_RMS = 0.2


def is_muon(name: str, spec: ParameterSpec, muon: MuonConfig) -> bool:
    """Whether a parameter is a matrix for Muon. Vectors, embeddings, head, convolutions and decay parameters are not;
    depth queries are vectors; the router goes by `optim.muon.router`."""
    if len(spec.shape) < 2 or spec.init != "normal":
        return False
    if name.endswith("router.weight"):
        return muon.router
    return not name.endswith(("embedding.weight", "lm_head.weight"))


def blocks(update: Tensor, spec: ParameterSpec, per_head: bool) -> list[Tensor]:
    """Views of a local matrix [rows, in] (or experts [E, out, in]) as stacks [n, A, B] to orthogonalise one by one."""
    if spec.expert:
        return [update]
    if not (per_head and spec.head_rows):
        return [update[None]]
    heads = update.view(-1, sum(spec.head_rows), update.shape[-1])
    return list(heads.split(list(spec.head_rows), dim=1))


def scale_of(block: Tensor, spec: ParameterSpec, scale: str) -> float:
    """0.2 sqrt(max(A, B)) for the block's own shape, or the whole logical matrix's."""
    rows, columns = block.shape[-2:] if scale == "block" else spec.shape[-2:]
    return UPDATE_RMS * max(rows, columns) ** 0.5


def orthogonalise(stack: Tensor, muon: MuonConfig) -> Tensor:
    """Newton-Schulz of each [A, B] of a stack [n, A, B], in bf16 or fp32, back in fp32."""
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
    from emerging_optimizers.utils import fp32_matmul_precision

    # medium makes the iteration run in bf16
    with fp32_matmul_precision("medium" if muon.ns_dtype == "bf16" else "highest"):
        return newton_schulz(stack, muon.ns_steps, "quintic")


@dataclass
class Matrix:
    """One parameter's turn in a step: its Nesterov momentum, whole over tensor ranks."""

    param: Tensor
    spec: ParameterSpec
    update: Tensor
    owner: int = 0


class PerHeadMuon(torch.optim.Optimizer):
    """Muon over parameters that carry their `ParameterSpec` as `.k3`. State: `momentum_buffer`, like the parameter.

    lr and weight_decay are per group; decay is decoupled, lr * weight_decay of the weight a step.
    """

    def __init__(
        self, params: Any, lr: float, weight_decay: float, muon: MuonConfig, layout: Layout, share_work: bool = True
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.muon, self.layout, self.share_work = muon, layout, share_work

    def initialize_state(self, param: Tensor) -> None:
        """Allocate the momentum of one parameter, as zeros."""
        self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            matrices = [self._momentum(p) for p in group["params"] if p.grad is not None]
            experts = [m for m in matrices if m.spec.expert]
            dense = [m for m in matrices if not m.spec.expert]
            self._orthogonalise(dense, self.layout.dp_cp)
            self._orthogonalise(experts, self.layout.expert_dp)
            for m in matrices:
                m.param.mul_(1.0 - group["lr"] * group["weight_decay"])
                m.param.add_(self._local(m), alpha=-group["lr"])

    def _momentum(self, p: Tensor) -> Matrix:
        if not self.state[p]:
            self.initialize_state(p)
        buffer = self.state[p]["momentum_buffer"]
        grad = p.grad.to(buffer.dtype)  # type: ignore[union-attr]
        buffer.mul_(self.muon.momentum).add_(grad)
        update = grad.add(buffer, alpha=self.muon.momentum)  # Nesterov
        spec: ParameterSpec = p.k3  # type: ignore[attr-defined]
        return Matrix(p, spec, self._whole(update, spec))

    def _cut(self, spec: ParameterSpec) -> bool:
        """Whether Newton-Schulz needs other tensor ranks' parts: not for heads, which are whole on a rank."""
        by_head = self.muon.per_head and bool(spec.head_rows)
        return self.layout.sizes.tensor > 1 and spec.tensor_axis is not None and not by_head and not spec.expert

    def _whole(self, update: Tensor, spec: ParameterSpec) -> Tensor:
        if not self._cut(spec):
            return update
        parts = [torch.empty_like(update) for _ in range(self.layout.sizes.tensor)]
        dist.all_gather(parts, update.contiguous(), group=self.layout.tp)
        return torch.cat(parts, dim=spec.tensor_axis)  # type: ignore[arg-type]

    def _local(self, m: Matrix) -> Tensor:
        if not self._cut(m.spec):
            return m.update
        return m.update.chunk(self.layout.sizes.tensor, dim=m.spec.tensor_axis)[self.layout.tp.rank()]  # type: ignore[arg-type]

    def _orthogonalise(self, matrices: list[Matrix], group: dist.ProcessGroup) -> None:
        """Replace every update by its scaled orthogonalisation; the work is shared over `group`."""
        share = self.share_work and group.size() > 1
        loads = [0.0] * (group.size() if share else 1)
        for m in sorted(matrices, key=lambda m: -m.update.numel() * min(m.update.shape[-2:])):  # heaviest first
            m.owner = loads.index(min(loads))
            loads[m.owner] += m.update.numel() * min(m.update.shape[-2:])
        mine = [m for m in matrices if not share or m.owner == group.rank()]
        stacks: dict[tuple[int, int], list[tuple[Tensor, Matrix]]] = {}
        for m in mine:
            m.update = m.update.contiguous()
            for block in blocks(m.update, m.spec, self.muon.per_head):
                stacks.setdefault((block.shape[-2], block.shape[-1]), []).append((block, m))
        for parts in stacks.values():  # one batched iteration for all blocks of a shape
            done = orthogonalise(torch.cat([block for block, _ in parts]), self.muon)
            for (block, m), out in zip(parts, done.split([block.shape[0] for block, _ in parts])):
                block.copy_(out * scale_of(block, m.spec, self.muon.scale))
        if share:
            for owner in range(group.size()):
                theirs = [m for m in matrices if m.owner == owner]
                if not theirs:
                    continue
                flat = torch.cat([m.update.reshape(-1) for m in theirs])
                dist.broadcast(flat, group=group, group_src=owner)
                for m, part in zip(theirs, flat.split([m.update.numel() for m in theirs])):
                    m.update = part.view_as(m.update)


def register(muon: MuonConfig, layout: Layout, routed: Callable[[Tensor], bool]) -> str:
    """Make megatron-core's optimizer factory build PerHeadMuon for parameters that `routed` accepts, AdamW for the
    others; returns the name to ask for."""
    from megatron.core.optimizer import emerging_optimizers as registry
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    def arguments(config: Any, _chunks: Any, _groups: Any) -> dict[str, Any]:
        return {"lr": config.lr, "weight_decay": config.weight_decay, "muon": muon, "layout": layout}

    others = ParamKey(predicate=ParamPredicate(name="not_muon", fn=lambda p: not routed(p)))
    registry._EMERGING_OPTIMIZERS[NAME] = registry.EmergingOptimizerEntry(
        optimizer_cls=PerHeadMuon,
        config_to_kwargs=arguments,
        default_param_overrides={others: {"optimizer": "adam"}},
    )
    return NAME


def carry_specs(optimizer: Any) -> None:
    """Give the fp32 master copies that megatron made the specs of the parameters they stand for."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        pairs = zip(getattr(one, "float16_groups", []), getattr(one, "fp32_from_float16_groups", []))
        for models, masters in pairs:
            for model, master in zip(models, masters):
                master.k3 = model.k3
