"""Which part of which parameter a rank's ZeRO optimizer holds: the one view that all stages share.

ZeRO-1 and 2 lay the parameters of a group end to end, cut the whole into equal parts, and may cut inside a parameter;
ZeRO-3 cuts every parameter into equal parts. Either way a rank holds one stretch of a flattened parameter, in fp32,
inside a flat tensor that the torch optimizer keeps state for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from k3train.train.optimizer import is_muon

if TYPE_CHECKING:
    from k3train.engine.deepspeed import DeepSpeedEngine


@dataclass
class Piece:
    """Elements [offset, offset + numel) of a flattened parameter, at `start` of the optimizer's `flat` fp32 tensor."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    flat: torch.Tensor
    start: int
    state: dict[str, Any]

    def fp32(self) -> torch.Tensor:
        """This stretch of the fp32 weights; a view."""
        return self.flat.detach().narrow(0, self.start, self.numel)

    def of(self, key: str) -> torch.Tensor:
        """This stretch of `key`: "fp32" or a state of the optimizer; a view."""
        return self.fp32() if key == "fp32" else self.state[key].narrow(0, self.start, self.numel)

    def slice_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This stretch of a whole tensor of the parameter's shape."""
        return whole.reshape(-1).narrow(0, self.offset, self.numel)


def pieces(engine: DeepSpeedEngine) -> Iterator[Piece]:
    """The pieces of this rank; parameters of which it holds nothing are left out."""
    yield from _of_stage3(engine) if engine.stage == 3 else _of_stage12(engine)


def _of_stage12(engine: DeepSpeedEngine) -> Iterator[Piece]:
    zero = engine.optimizer
    for name, p in engine.names.items():
        held = p._hp_mapping  # type: ignore[attr-defined]
        if held is None:
            continue
        flat = zero.single_partition_of_fp32_groups[held.param_group_index]
        there, here = held.lp_fragment_address, held.hp_fragment_address
        state = zero.optimizer.state[flat]
        yield Piece(name, tuple(p.k3.shape), there.start, here.numel, flat, here.start, state)  # type: ignore[attr-defined]


def _of_stage3(engine: DeepSpeedEngine) -> Iterator[Piece]:
    zero, rank = engine.optimizer, engine.layout.dp.rank()
    names = {id(p): n for n, p in engine.names.items()}
    for group, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        start = 0
        for p in group:
            size = p.partition_numel()
            offset = min(rank * size, p.ds_numel)
            numel = min(size, p.ds_numel - offset)
            if numel > 0:
                state = zero.optimizer.state[flat]
                yield Piece(names[id(p)], tuple(p.ds_shape), offset, numel, flat, start, state)
            start += size


def whole(engine: DeepSpeedEngine, flat: torch.Tensor, local: torch.Tensor) -> dict[str, torch.Tensor]:
    """Whole tensors, by parameter, of which every rank has `local`, laid out like `flat`. Collective.

    In stages 1 and 2 only those parameters that this rank holds something of; in stage 3 all of the group.
    """
    parts = [torch.empty_like(local) for _ in range(engine.layout.sizes.data)]
    if len(parts) > 1:
        dist.all_gather(parts, local, group=engine.layout.dp)
    else:
        parts = [local]
    zero, names = engine.optimizer, {id(p): n for n, p in engine.names.items()}
    found = {}
    if engine.stage == 3:
        group = next(g for g, f in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat) if f is flat)
        start = 0
        for p in group:
            size = p.partition_numel()
            stretches = torch.cat([part.narrow(0, start, size) for part in parts])
            found[names[id(p)]] = stretches[: p.ds_numel].view(p.ds_shape)
            start += size
        return found
    number = next(i for i, f in enumerate(zero.single_partition_of_fp32_groups) if f is flat)
    joined = torch.cat(parts)
    for p, offset in zip(zero.round_robin_bit16_groups[number], zero.round_robin_bit16_offsets[number]):
        if p._hp_mapping is not None:
            found[names[id(p)]] = joined.narrow(0, offset, p.numel()).view(p.shape)
    return found


def gather(engine: DeepSpeedEngine, key: str) -> dict[str, torch.Tensor]:
    """Whole tensors of `key` ("fp32" or a state of the optimizer) by parameter, fp32 on CPU, on every rank."""
    held = {piece.name: piece for piece in pieces(engine)}
    whole = {}
    for name, p in engine.names.items():
        shape = tuple(p.k3.shape)  # type: ignore[attr-defined]
        buffer = torch.zeros(shape, device=engine.device)
        if name in held:
            held[name].slice_of(buffer).copy_(held[name].of(key))
        if dist.get_world_size() > 1:
            dist.all_reduce(buffer, group=engine.layout.dp)
        whole[name] = buffer.cpu()
    return whole


def state_keys(engine: DeepSpeedEngine, name: str) -> tuple[str, ...]:
    """The states that the optimizer keeps for every element of a parameter, once it has stepped."""
    spec = engine.names[name].k3  # type: ignore[attr-defined]
    if engine.config.optim.name == "muon" and is_muon(name, spec, engine.config.optim.muon):
        return ("momentum_buffer",)
    return ("exp_avg", "exp_avg_sq")


def has_stepped(engine: DeepSpeedEngine) -> bool:
    """Whether the optimizer has state. Collective: a rank that holds no element has none."""
    return bool(engine.agree(int(any(piece.state for piece in pieces(engine)))))


def collect(engine: DeepSpeedEngine, *, optimizer: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Whole tensors by parameter and key, fp32 on CPU, of the parameters that this rank is to write. Collective.

    Every parameter goes to one rank, so that all write about as much.
    """
    held = {piece.name: piece for piece in pieces(engine)}
    loads = [0] * dist.get_world_size()
    mine: dict[str, dict[str, torch.Tensor]] = {}
    for name, p in engine.names.items():
        shape = tuple(p.k3.shape)  # type: ignore[attr-defined]
        owner = loads.index(min(loads))
        loads[owner] += torch.Size(shape).numel()
        for key in ("fp32", *(state_keys(engine, name) if optimizer else ())):
            if len(loads) == 1:
                mine.setdefault(name, {})[key] = held[name].of(key).to("cpu", copy=True).view(shape)
                continue
            buffer = torch.zeros(shape, device=engine.device)
            if name in held:
                held[name].slice_of(buffer).copy_(held[name].of(key))
            dist.reduce(buffer, group_dst=owner, group=engine.layout.dp)
            if owner == engine.layout.dp.rank():
                mine.setdefault(name, {})[key] = buffer.cpu()
    return mine


@torch.no_grad()
def refresh_model(engine: DeepSpeedEngine) -> None:
    """Give the model the fp32 weights that were written into the optimizer. Collective."""
    zero = engine.optimizer
    if engine.stage < 3:
        zero.update_lp_params()
        return
    zero._partition_all_parameters()
    for group in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(group)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
