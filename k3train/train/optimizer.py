"""Per-head Muon (report section 2.5): orthogonalised momentum for matrices, AdamW for everything else.

The momentum of the q, k, v projections is split by head and each block orthogonalised by itself; other matrices whole;
each expert matrix by itself. Newton-Schulz is batched over equal shapes. An update has the root mean square 0.2
whatever the shape: 0.2 sqrt(max(A, B)) times an orthogonal A x B matrix (Moonlight), with A x B the block's shape or
the whole matrix's (`optim.muon.scale`).

The same update under every layout: heads and experts are whole on a rank; a matrix cut over tensor ranks is gathered
for Newton-Schulz. Over data-parallel ranks, which hold equal momenta, each matrix is orthogonalised by one rank and
sent to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from k3train.config.schema import MuonConfig
from k3train.model.parameters import ParameterSpec
from k3train.parallel.layout import Layout

NAME = "k3_muon"
UPDATE_RMS = 0.2
QUINTIC = (
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)  # fmt: skip
"""Newton-Schulz coefficients a, b, c of each step: those of emerging-optimizers' "quintic", which are steepest at zero
for five steps. Its own function takes fp32 and returns fp32; memory traffic is half of the cost of this optimizer."""
BATCH = 1 << 28  # elements of momentum that are put together at once
PIECE = 1 << 28  # elements that are iterated on at once: fewer take longer on an H200 (docs/recipe.md)


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


@torch.no_grad()
def orthogonalise_(stack: Tensor, steps: int) -> Tensor:
    """Newton-Schulz of each [A, B] of a stack [n, A, B], in place and in the stack's dtype; steps > 0.

    X <- a X + (b G + c G^2) X with G = X X^T, on the shorter side; singular values end between 0.7 and 1.2.
    """
    on_gpu = stack.is_cuda and stack.dtype == torch.bfloat16
    for part in stack.split(max(1, PIECE // stack[0].numel())):
        (folded_ if on_gpu else by_torch_)(part, steps)
    return stack


def by_torch_(stack: Tensor, steps: int) -> None:
    """The iteration as it is written, with torch's products: on a CPU, and in fp32."""
    norm = torch.linalg.vector_norm(stack, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = stack.div_(norm.clamp_min_(1e-7))
    wide = x.shape[-2] <= x.shape[-1]
    for step, (a, b, c) in enumerate(islice(cycle(QUINTIC), steps)):
        short = x if wide else x.mT
        gram = torch.bmm(short, short.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        into = stack if step == steps - 1 > 0 else None  # before the last step, x is no longer the stack
        left, right = (polynomial, x) if wide else (x, polynomial)
        x = torch.baddbmm(x, left, right, beta=a, out=into)
    if x is not stack:
        stack.copy_(x)


def folded_(stack: Tensor, steps: int) -> None:
    """The same iteration as X <- (a I + b G + c G^2) X, by Triton: the factor of a step is one symmetric matrix, rounded
    to bf16 once, and the norm, whose square is the trace of the first G, is divided by in the first factor.

    No pass over X for the norm, and no a X added to a product, for which torch first copies X: 36 bytes an element of X
    less to move in five steps (docs/recipe.md has the times).
    """
    from k3train.train.newton_schulz_triton import polynomial, symmetric_product, traces

    x, wide = stack, stack.shape[-2] <= stack.shape[-1]
    for step, (a, b, c) in enumerate(islice(cycle(QUINTIC), steps)):
        gram = symmetric_product(x if wide else x.mT)
        factor = polynomial(gram, a, b, c, traces(gram) if step == 0 else None)
        into = stack if step == steps - 1 > 0 else None  # before the last step, x is no longer the stack
        x = torch.bmm(factor, x, out=into) if wide else torch.bmm(x, factor, out=into)
    if x is not stack:
        stack.copy_(x)


@dataclass
class Matrix:
    """One parameter's turn in a step.

    sources: what its blocks are made of, stacks [n, A, B]: views of the momentum, or of the whole Nesterov momentum
    where tensor ranks hold parts of the matrix (`cut`). out: the blocks, orthogonalised.
    """

    param: Tensor
    spec: ParameterSpec
    sources: list[Tensor]
    cut: bool = False
    owner: int = 0
    out: list[Tensor | None] = field(default_factory=list)

    @property
    def work(self) -> float:
        return float(sum(s.numel() * min(s.shape[-2:]) for s in self.sources))


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
        """Update every matrix that has a gradient; data-parallel ranks share the work of equal matrices."""
        for group in self.param_groups:
            matrices = [self._matrix(p) for p in group["params"] if p.grad is not None]
            kinds = [([m for m in matrices if not m.spec.expert], self.layout.dp_cp)]
            kinds.append(([m for m in matrices if m.spec.expert], self.layout.expert_dp))
            for of_kind, ranks in kinds:
                share = self.share_work and ranks.size() > 1
                self._assign(of_kind, ranks.size() if share else 1)
                mine = [m for m in of_kind if not share or m.owner == ranks.rank()]
                for batch in self._batches(mine):
                    self._orthogonalise(batch)
                    if not share:  # what is whole now can go
                        for m in {id(m): m for m, _ in batch}.values():
                            if all(out is not None for out in m.out):
                                self._apply(m, group["lr"], group["weight_decay"])
                if share:
                    for m in of_kind:
                        if m.owner != ranks.rank() and not m.cut:  # every rank has all momenta
                            buffer = self.state[m.param]["momentum_buffer"]
                            torch.add(m.param.grad, buffer, alpha=self.muon.momentum, out=buffer)
                    self._exchange(of_kind, ranks)
                    for m in of_kind:
                        self._apply(m, group["lr"], group["weight_decay"])

    def _matrix(self, p: Tensor) -> Matrix:
        """A parameter's turn: its momentum has still to be updated, except where tensor ranks put theirs together."""
        if not self.state[p]:
            self.initialize_state(p)
        buffer = self.state[p]["momentum_buffer"]
        spec: ParameterSpec = p.k3  # type: ignore[attr-defined]
        if not self._cut(spec):
            return Matrix(p, spec, blocks(buffer, spec, self.muon.per_head))
        torch.add(p.grad, buffer, alpha=self.muon.momentum, out=buffer)
        update = torch.add(p.grad, buffer, alpha=self.muon.momentum)
        parts = [torch.empty_like(update) for _ in range(self.layout.sizes.tensor)]
        dist.all_gather(parts, update.contiguous(), group=self.layout.tp)
        return Matrix(p, spec, [torch.cat(parts, dim=spec.tensor_axis)[None]], cut=True)  # type: ignore[arg-type]

    def _dtype(self, device: torch.device) -> torch.dtype:
        """bf16 products are faster than fp32 ones on GPUs, and slower on CPUs."""
        wanted = self.muon.ns_dtype
        return torch.bfloat16 if wanted == "bf16" or (wanted == "auto" and device.type == "cuda") else torch.float32

    def _cut(self, spec: ParameterSpec) -> bool:
        """Whether Newton-Schulz needs other tensor ranks' parts: not for heads, which are whole on a rank."""
        by_head = self.muon.per_head and bool(spec.head_rows)
        return self.layout.sizes.tensor > 1 and spec.tensor_axis is not None and not by_head and not spec.expert

    def _assign(self, matrices: list[Matrix], ranks: int) -> None:
        """Give each matrix to the rank that has least to do, heaviest first."""
        loads = [0.0] * ranks
        for m in sorted(matrices, key=lambda m: -m.work):
            m.owner = loads.index(min(loads))
            loads[m.owner] += m.work

    def _batches(self, matrices: list[Matrix]) -> Iterator[list[tuple[Matrix, int]]]:
        """(matrix, number of a stack of its blocks), in bounded batches of one block shape each."""
        shapes: dict[tuple[int, int], list[tuple[Matrix, int]]] = {}
        for m in matrices:
            m.out = [None] * len(m.sources)
            for i, source in enumerate(m.sources):
                shapes.setdefault((source.shape[-2], source.shape[-1]), []).append((m, i))
        for parts in shapes.values():
            batch: list[tuple[Matrix, int]] = []
            size = 0
            for m, i in parts:
                more = m.sources[i].numel()
                if batch and size + more > BATCH:
                    yield batch
                    batch, size = [], 0
                batch.append((m, i))
                size += more
            yield batch

    def _orthogonalise(self, batch: list[tuple[Matrix, int]]) -> None:
        """One iteration for all blocks of a batch."""
        first, counts = batch[0][0].sources[batch[0][1]], [m.sources[i].shape[0] for m, i in batch]
        stack = torch.empty(sum(counts), *first.shape[1:], dtype=self._dtype(first.device), device=first.device)
        for (m, i), place in zip(batch, stack.split(counts)):
            if m.cut:
                place.copy_(m.sources[i])
            else:
                grad = blocks(m.param.grad, m.spec, self.muon.per_head)[i]  # type: ignore[arg-type]
                self._nesterov(grad, m.sources[i], place)
        for (m, i), out in zip(batch, orthogonalise_(stack, self.muon.ns_steps).split(counts)):
            m.out[i] = out

    def _nesterov(self, grad: Tensor, buffer: Tensor, out: Tensor) -> None:
        """buffer <- grad + momentum buffer; out = grad + momentum buffer. Stacks [n, A, B]."""
        momentum = self.muon.momentum
        if buffer.is_cuda:
            from k3train.train.newton_schulz_triton import fits, momentum_

            if fits(grad, buffer, out):
                momentum_(grad, buffer, out, momentum)
                return
        torch.add(grad, buffer, alpha=momentum, out=buffer)
        torch.add(grad, buffer, alpha=momentum, out=out)

    def _apply(self, m: Matrix, lr: float, weight_decay: float) -> None:
        """Decay and move one parameter."""
        decay = 1.0 - lr * weight_decay
        places = [m.param[None]] if m.cut else blocks(m.param, m.spec, self.muon.per_head)
        for place, out in zip(places, m.out, strict=True):
            assert out is not None
            alpha = -lr * scale_of(out, m.spec, self.muon.scale)
            if place.is_cuda and not m.cut:
                from k3train.train.newton_schulz_triton import decay_and_add_, fits

                if fits(place, out):
                    decay_and_add_(place, out, decay, alpha)
                    continue
            if m.cut:
                axis = m.spec.tensor_axis + 1  # type: ignore[operator]
                out = out.chunk(self.layout.sizes.tensor, dim=axis)[self.layout.tp.rank()]
            place.mul_(decay).add_(out, alpha=alpha)
        m.out = []

    def _exchange(self, matrices: list[Matrix], ranks: dist.ProcessGroup) -> None:
        """Every rank sends the matrices that it has orthogonalised to the others."""
        for owner in range(ranks.size()):
            theirs = [m for m in matrices if m.owner == owner]
            if not theirs:
                continue
            if owner == ranks.rank():
                flat = torch.cat([out.reshape(-1) for m in theirs for out in m.out if out is not None])
            else:
                count = sum(s.numel() for m in theirs for s in m.sources)
                device = theirs[0].param.device
                flat = torch.empty(count, dtype=self._dtype(device), device=device)
            dist.broadcast(flat, group=ranks, group_src=owner)
            pieces = iter(flat.split([s.numel() for m in theirs for s in m.sources]))
            for m in theirs:
                m.out = [next(pieces).view(s.shape) for s in m.sources]


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
