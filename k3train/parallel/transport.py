"""What crosses a pipeline border with attention residuals: finished sources and the running sum, as one packed tensor.

Stages are numbered in the order data flows: stage s is chunk s // P of pipeline rank s % P. Two ways to send:

    padded   every border carries as many tensors as the fullest one, so that all transfers have one shape
    cached   a rank keeps the finished sources that its earlier chunk saw, and receives only those made since, and the
             running sum (attention residuals report, section 4.1). The gradient of a kept source comes back through a
             detached leaf and joins when its own chunk runs backward; leaves live as long as their micro-batch.

Sizes follow from the split of the layers alone. The communicator takes the shape of each transfer from that table: no
shapes are exchanged and nothing waits for the host.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from k3train.errors import LayoutError

TRANSPORTS = ("cached", "padded")


@dataclass(frozen=True)
class Borders:
    """Tensors [T_local, d] at the borders of the stages of one pipeline.

    held[s]: tensors of the depth state in front of stage s, the running sum last; held[0] is 1, the embedding.
    final[s]: whether that running sum is a finished source already (a block ends exactly there).
    """

    pipeline: int
    held: tuple[int, ...]
    final: tuple[bool, ...]
    transport: str = "cached"

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise LayoutError(f"parallel.transport={self.transport!r} is not one of {', '.join(TRANSPORTS)}")

    @property
    def stages(self) -> int:
        return len(self.held)

    def keeps(self, stage: int) -> int:
        """Finished sources that the rank of `stage` holds when it has run it, for its next chunk."""
        after = stage + 1
        if self.transport == "padded" or stage + self.pipeline >= self.stages:
            return 0
        return min(self.held[after] - 1 + self.final[after], self.held[stage + self.pipeline] - 1)

    def cached(self, stage: int) -> int:
        """Finished sources that `stage` finds on its own rank."""
        return self.keeps(stage - self.pipeline) if stage >= self.pipeline else 0

    def received(self, stage: int) -> int:
        """Tensors that `stage` receives, padding included; 0 for the first."""
        if stage == 0:
            return 0
        return max(self.held) if self.transport == "padded" else self.held[stage] - self.cached(stage)

    def bytes_received(self, stage: int, tokens: int, width: int, itemsize: int) -> int:
        """Bytes of one forward transfer into `stage`; its gradient comes back in as many."""
        return self.received(stage) * tokens * width * itemsize


def borders(
    ranges: list[tuple[int, int]], pipeline: int, transport: str, tensors_before: Callable[[int], int],
    ends_source: Callable[[int], bool],
) -> Borders:  # fmt: skip
    """The table of a split: layer ranges of the stages, tensors in front of a layer, whether a source ends there."""
    firsts = [first for first, _ in ranges]
    held, final = tuple(map(tensors_before, firsts)), tuple(map(ends_source, firsts))
    return Borders(pipeline, held, final, transport)


class StageLink:
    """One stage's ends of its two borders. A rank's chunks are linked by `earlier`, whose kept leaves this one takes."""

    def __init__(self, table: Borders, stage: int, earlier: StageLink | None) -> None:
        self.table, self.stage, self.earlier = table, stage, earlier
        self.kept: deque[list[torch.Tensor]] = deque()  # one entry a micro-batch, in order, taken by the next chunk

    def receive(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Packed [received * T_local, 1, d] -> the depth state in front of this stage, the running sum last."""
        table, stage = self.table, self.stage
        tensors = list(packed.squeeze(1).chunk(table.received(stage)))
        before = [] if self.earlier is None or not table.cached(stage) else self.earlier.kept.popleft()
        return [*before, *tensors][: table.held[stage]]

    def send(self, sources: list[torch.Tensor]) -> torch.Tensor:
        """The depth state after this stage [T_local, d] each, running sum last -> packed for the next stage."""
        table, after = self.table, self.stage + 1
        assert len(sources) == table.held[after], (len(sources), table.held[after])
        keep = table.keeps(self.stage)
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in sources[:keep]]
        if keep:
            self.kept.append(leaves)
        skip = table.cached(after)
        padding = table.received(after) - (len(sources) - skip)
        return _Send.apply(skip, padding, leaves, *sources)

    def clear(self) -> None:
        """Forget what a step that did not run to its end has left."""
        self.kept.clear()


class _Send(torch.autograd.Function):
    """Packs sources[skip:] and zeros; its backward adds what the kept leaves have collected since."""

    @staticmethod
    def forward(ctx: Any, skip: int, padding: int, leaves: list[torch.Tensor], *sources: torch.Tensor) -> torch.Tensor:
        ctx.skip, ctx.leaves, ctx.slots = skip, leaves, len(sources) - skip + padding
        # never a view: the schedule frees the storage once it is sent
        zeros = [torch.zeros_like(sources[-1])] * padding
        return torch.cat([t.unsqueeze(1) for t in (*sources[skip:], *zeros)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        sent: list[torch.Tensor | None] = list(grad.squeeze(1).chunk(ctx.slots))
        total = len(ctx.needs_input_grad) - 3
        grads = ([None] * ctx.skip + sent)[:total]
        for i, leaf in enumerate(ctx.leaves):
            if leaf.grad is not None:
                grads[i] = leaf.grad if grads[i] is None else grads[i] + leaf.grad
            # the micro-batch is over on this rank; a schedule's closures may hold its graph, and so the leaf, longer
            leaf.grad, leaf.data = None, leaf.new_empty(0)
        ctx.leaves = None
        return (None, None, None, *grads)


def _free(packed: torch.Tensor) -> None:
    """Give the memory of a packed tensor back: its backward needs its place in the graph only."""
    packed.untyped_storage().resize_(0)


class _Sent:
    """A send under way whose tensor is freed once it has been waited for.

    megatron would wait right after each send to free it (`deallocate_pipeline_outputs`), so that compute stands still
    until the next stage has taken the tensor. Waiting with the send after it is early enough.
    """

    def __init__(self, work: dist.Work, packed: torch.Tensor) -> None:
        self.work, self.packed = work, packed

    def wait(self) -> None:
        self.work.wait()
        _free(self.packed)


class Communicator(P2PCommunicator):
    """megatron's transfers between stages, with every shape known before it is needed.

    `begin` is called once a schedule; transfers into a rank follow the schedule's table of (micro-batch, chunk).
    sent: bytes of each tensor sent in the last schedule, forward and backward, in order.
    """

    def __init__(self, group: dist.ProcessGroup, config: ModelParallelConfig, table: Borders, tokens: int) -> None:
        """tokens: T_local of a micro-batch."""
        interleaved = config.virtual_pipeline_model_parallel_size is not None
        if interleaved and (config.batch_p2p_comm or not config.overlap_p2p_comm):
            raise LayoutError(
                "virtual pipeline stages need overlap_p2p_comm=True and batch_p2p_comm=False: batched transfers "
                "between two ranks are ambiguous in the interleaved schedule, and silently wrong"
            )
        config = copy.copy(config)
        config.variable_seq_lengths = True  # the base class then asks `_communicate_shapes`: the table answers
        config.batch_p2p_sync = False  # a wait of the host after every batched transfer, for a fault of old torch
        super().__init__(group, config)
        self.table, self.tokens = table, tokens
        self.chunks = table.stages // table.pipeline
        self._forward: deque[int] = deque()
        self._backward: deque[int] = deque()
        self.sent: dict[str, list[int]] = {"forward": [], "backward": []}
        self._open: list[dist.Work] = []

    def begin(self, micro_batches: int, *, forward_only: bool) -> None:
        """Note down the order in which this rank's stages receive."""
        rank, pipeline, last = self.pp_group.rank(), self.table.pipeline, self.table.stages - 1
        order = [0] * micro_batches
        if self.chunks > 1:
            group = self.config.microbatch_group_size_per_vp_stage
            order = [chunk for _, chunk in get_schedule_table(micro_batches, self.chunks, group)]
        forward = [c * pipeline + rank for c in order]
        backward = [] if forward_only else [(self.chunks - 1 - c) * pipeline + rank for c in order]
        self._forward = deque(s for s in forward if s > 0)
        self._backward = deque(s for s in backward if s < last)
        self.sent = {"forward": [], "backward": []}
        self._open = []

    def join(self) -> None:
        """Make the current CUDA stream wait for every transfer of this schedule, also for the last sends, whose end
        nobody on this rank needs: a capture must not end while a stream that it forked is open."""
        for work in self._open:
            work.wait()
        self._open = []

    def finished(self) -> bool:
        """Whether every transfer that `begin` noted has been asked for."""
        return not self._forward and not self._backward

    def shape(self, slots: int) -> list[int]:
        return [slots * self.tokens, 1, self.config.hidden_size]  # type: ignore[attr-defined]

    def _communicate(self, **options: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
        sent = options["tensor_send_next"] if self.chunks > 1 else None
        from_before, from_after, works = super()._communicate(**options)
        if works and torch.cuda.is_available():  # gloo's transfers can be waited for once only
            self._open += works.values()
        if sent is not None and works:
            works["send_next"] = _Sent(works["send_next"], sent)
        elif sent is not None:  # it has been waited for
            _free(sent)
        return from_before, from_after, works

    def _communicate_shapes(
        self, tensor_send_next: torch.Tensor | None, tensor_send_prev: torch.Tensor | None, recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:  # fmt: skip
        for direction, tensor in (("forward", tensor_send_next), ("backward", tensor_send_prev)):
            if tensor is not None:
                self.sent[direction].append(tensor.numel() * tensor.element_size())
        before = self.shape(self.table.received(self._forward.popleft())) if recv_prev else [0, 0, 0]
        after = self.shape(self.table.received(self._backward.popleft() + 1)) if recv_next else [0, 0, 0]
        return before, after
