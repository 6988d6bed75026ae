"""The megatron-core engine: DDP, distributed optimizer, pipeline schedules, resharding checkpoints."""

from __future__ import annotations

import functools
import gc
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch.distributed.checkpoint.api import CheckpointException

from k3train.config.activations import policies
from k3train.config.precision import Precision, precision_of
from k3train.config.schema import Config
from k3train.engine import gradients, plain_state
from k3train.engine.base import Batch, StepResult
from k3train.engine.gate import UpdateGate
from k3train.engine.graphs import StepGraphs, agreed, to_device, whole_schedule
from k3train.engine.saving import Checksums, Saver
from k3train.engine.sharded_state import model_state, sharded_tensor
from k3train.engine.snapshot import HostCopies, optimizer_twin
from k3train.errors import CheckpointError
from k3train.model.build import build_chunks, chunks_of_rank, link_stages, make_context, stage_borders
from k3train.model.context import PackedStream
from k3train.model.k3 import K3Model
from k3train.model.mtp import further
from k3train.parallel.expert_exchange import ExchangePlan
from k3train.parallel.layout import Layout
from k3train.parallel.slices import Spans, spans
from k3train.parallel.transport import Communicator
from k3train.train import optimizer as muon_optimizer
from k3train.train.qk_clip import QKClip

UNIT_LR = 1.0
"""The peak rate that optimizer groups name. Every step sets the real one; in a checkpoint megatron knows a group again
by this number, which must not change when a run goes on with another optim.lr."""


def training_dtype(precision: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16 on GPU and fp32 on CPU; under FP8 recipes everything between the products is bf16."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return torch.float32 if precision == "fp32" else torch.bfloat16


def has_weight_decay(param: torch.nn.Parameter) -> bool:
    """Matrices only: none on vectors, short convolutions, A_log and dt_bias (spec table 8 row 17)."""
    spec = param.k3  # type: ignore[attr-defined]
    return len(spec.shape) >= 2 and spec.init not in ("conv", "dt_bias")


class MegatronEngine:
    """One rank's share of the model and of its optimizer."""

    def __init__(self, config: Config, layout: Layout, device: torch.device) -> None:
        self.config, self.layout, self.device = config, layout, device
        stream = self._capturing_stream()
        dtype = training_dtype(config.train.precision, device)
        self.ctx = make_context(
            config.model, layout, dtype, device, recompute=config.train.recompute,
            recompute_layers=config.train.recompute_layers, activations=policies(config.train),
            precision=self._precision(), exchange=self._make_exchange(),
        )  # fmt: skip
        chunks = chunks_of_rank(config.model, layout.sizes, layout.pp.rank(), config.parallel.pipeline_layout)
        self.models: list[K3Model] = build_chunks(self.ctx, chunks, seed=config.run.seed)
        self.transport = self._link_stages()
        self.ddp = self._wrap()
        self.optimizer = self._make_optimizer()
        self.sums = torch.zeros(2 + 2 * bool(config.model.mtp_layers), dtype=torch.float64, device=device)
        """Of a step: loss and tokens that it counts, and those of multi-token prediction."""
        self.gate = UpdateGate(self.optimizer, device, self.sums, config.optim.clip_grad)
        if self.ctx.exchange.fullest is not None:
            self.gate.incomplete = self.ctx.exchange.overflowed
        self.qk_clip = self._make_qk_clip()
        self.saver, self._first_save = Saver(), True
        self.whole = whole_schedule(config.parallel)
        """Whether a captured graph holds the schedule of a whole step, or one micro-batch of it."""
        run = self._schedule if self.whole else self._one_micro_batch
        self.graphs = None if stream is None else StepGraphs(run, stream)
        self.spans: Spans | None = None
        """While a graph is captured or replayed: bounds on its documents."""

    # -- building ---------------------------------------------------------------------------------------------------

    def _precision(self) -> Precision:
        train = self.config.train
        return precision_of(train.precision, train.bf16_parts, cache_weights=train.fp8_cache_weights)

    def _capturing_stream(self) -> torch.cuda.Stream | None:
        """With captured graphs, a stream of our own for everything this process does from here on."""
        if self.config.train.cuda_graphs == "none" or self.device.type != "cuda":
            return None
        # NCCL would map the buffers of captured transfers into its peers, for as long as the graph lives
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)
        return stream

    def _make_exchange(self) -> ExchangePlan:
        """How rows reach the experts of other ranks; with slots, a count on the device of what they would have had to hold."""
        p = self.config.parallel
        plan = ExchangePlan(p.expert_exchange, p.expert_capacity, p.overlap_experts)
        if p.expert > 1 and plan.kind == "slots":
            plan.fullest = torch.zeros(1, dtype=torch.int32, device=self.device)
        return plan

    def _link_stages(self) -> Communicator | None:
        """Tell every chunk what crosses its borders, and make the transfers of this rank."""
        sizes, parallel, train = self.layout.sizes, self.config.parallel, self.config.train
        if sizes.pipeline == 1:
            return None
        table = stage_borders(self.config.model, sizes, parallel.pipeline_layout, parallel.transport)
        link_stages(self.models, table)
        split = sizes.context * (sizes.tensor if sizes.sequence_parallel else 1)
        return Communicator(self.layout.pp, self.ctx.megatron, table, train.seq_length * train.micro_batch // split)

    def _wrap(self) -> list[DistributedDataParallel]:
        parallel = self.config.parallel
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self.shards_state,
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            overlap_param_gather=parallel.overlap_param_gather,
        )
        wrapped = []
        for i, model in enumerate(self.models):
            model.model_type = ModelType.encoder_or_decoder
            wrapped.append(DistributedDataParallel(self.ctx.megatron, ddp_config, model, disable_bucketing=i > 0))
        config = self.ctx.megatron
        config.finalize_model_grads_func = self._finalize
        if parallel.overlap_grad_reduce:
            no_sync = [w.no_sync for w in wrapped]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
            starts = [w.start_grad_sync for w in wrapped]
            config.grad_sync_func = starts if len(starts) > 1 else starts[0]
        if parallel.overlap_param_gather:
            gathers = [w.start_param_sync for w in wrapped]
            config.param_sync_func = gathers if len(gathers) > 1 else gathers[0]
        return wrapped

    def _make_optimizer(self) -> Any:
        optim = self.config.optim
        config = OptimizerConfig(
            optimizer=self._register_muon() if optim.name == "muon" else "adam",
            lr=UNIT_LR, min_lr=0.0, weight_decay=optim.weight_decay, adam_beta1=optim.beta1,
            adam_beta2=optim.beta2, adam_eps=optim.eps, clip_grad=0.0,  # the gate clips
            bf16=self.ctx.dtype == torch.bfloat16, params_dtype=self.ctx.dtype,
            use_distributed_optimizer=self.shards_state,
            overlap_param_gather=self.config.parallel.overlap_param_gather,
        )  # fmt: skip

        def without_decay(name: str, fp32: bool) -> ParamKey:
            def wanted(p: torch.nn.Parameter) -> bool:
                return not has_weight_decay(p) and (p.dtype == torch.float32) == fp32

            return ParamKey(predicate=ParamPredicate(name=name, fn=wanted))

        # fp32 parameters of a bf16 model get a group of their own (told apart by naming another peak rate): in a
        # group of both dtypes megatron's distributed optimizer pairs states with the wrong parameters on saving
        overrides: dict[ParamKey, Any] = {
            without_decay("no_decay", False): {"wd_mult": 0.0},
            without_decay("no_decay_fp32", True): {"wd_mult": 0.0, "max_lr": 2 * UNIT_LR},
        }
        optimizer = get_megatron_optimizer(config, self.ddp, config_overrides=overrides)
        if optim.name == "muon":
            muon_optimizer.carry_specs(optimizer)
        return optimizer

    @property
    def shards_state(self) -> bool:
        """Whether optimizer state is cut over data-parallel ranks (ZeRO-1). Muon needs whole matrices: its ranks share
        the work of orthogonalising instead."""
        return self.config.parallel.distributed_optimizer and self.config.optim.name != "muon"

    def _register_muon(self) -> str:
        muon = self.config.optim.muon
        matrices = {
            id(p) for m in self.models for n, p in m.named_parameters() if muon_optimizer.is_muon(n, p.k3, muon)
        }
        return muon_optimizer.register(muon, self.layout, lambda p: id(p) in matrices)

    def _make_qk_clip(self) -> QKClip | None:
        tau = self.config.optim.qk_clip
        return None if tau is None else QKClip(tau, self.models, self.optimizer, self.layout)

    def _finalize(self, models: list[Any], _num_tokens: torch.Tensor | None = None, **options: Any) -> None:
        # told the tokens, megatron would divide all gradients by them in a pass of its own: the gate does it with clipping
        # replicated-but-partial gradients first: the data-parallel reduction may leave a rank only its own shard
        if not self.config.parallel.overlap_grad_reduce:
            gradients.sum_over_tensor_ranks(self.models, self.layout)
            finalize_model_grads(models, None, **options)
        else:
            finalize_model_grads(models, None, **options)
            gradients.sum_over_tensor_ranks(self.models, self.layout)

    # -- stepping ---------------------------------------------------------------------------------------------------

    def _forward(self, batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
        held = next(batches)
        batch = to_device(held, self.device)
        total = batch["tokens"].shape[0]
        start, length = self._slice(total)
        stream = PackedStream(batch["cu_seqlens"], total, sequence_length=self.config.train.seq_length)
        # what may be captured asks the host for nothing, in the steps that are launched from Python too
        device_only = self.config.train.cuda_graphs != "none" and model.training
        stream.on_device = device_only and self.layout.sizes.context > 1
        if stream.on_device:
            stream.spans = self.spans_of([held]) if self.spans is None else self.spans
        if not device_only and not held["cu_seqlens"].is_cuda:
            stream.bounds = held["cu_seqlens"].tolist()
        tokens = batch["tokens"].narrow(0, start, length)
        labels = batch["labels"].narrow(0, start, length)
        mask = batch["loss_mask"].narrow(0, start, length)
        stream.loss_weight = mask
        if "valid" in batch:
            stream.valid = batch["valid"].narrow(0, start, length)
        if self.config.model.mtp_layers and model.training:
            stream.further = further(batch["labels"], batch["loss_mask"], stream, start, length)
        output = model(tokens, labels, stream)

        def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            total_loss = (losses * mask).sum()
            numbers = [total_loss.detach(), mask.sum()]
            ahead = stream.further
            if ahead is not None and ahead.loss is not None:
                numbers += [ahead.loss.detach(), ahead.mask.sum()]
                total_loss = total_loss + self.config.model.mtp_loss_weight * ahead.loss
            return total_loss, numbers[1].int(), {"sums": torch.stack(numbers).double()}

        return output, loss_func

    def _slice(self, total: int) -> tuple[int, int]:
        """This context-parallel rank's contiguous tokens of a stream."""
        size = self.layout.sizes.context
        return self.layout.cp.rank() * (total // size), total // size

    def run_schedule(
        self, forward: Callable[..., Any], sources: list[Any], micro_batches: int, *, forward_only: bool,
        collect_non_loss_data: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Run megatron's schedule with one source of batches a model chunk; what the loss function returned, on the
        ranks of the last stage."""
        train = self.config.train
        options: dict[str, Any] = {}
        if self.transport is not None:
            self.transport.begin(micro_batches, forward_only=forward_only)
            options = {"p2p_communicator": self.transport, "pg_collection": self.layout.groups}
        for model in self.models:
            if model.link is not None:
                model.link.clear()
        single = len(self.ddp) == 1
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=sources[0] if single else sources,
            model=self.ddp[0] if single else self.ddp,
            num_microbatches=micro_batches,
            seq_length=train.seq_length * train.micro_batch,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            **options,
        )

    def _run_schedule(self, batches: Iterator[Batch], micro_batches: int, *, forward_only: bool) -> torch.Tensor:
        """`sums` over all ranks: valid until the next call."""
        self.ctx.backend.weights_changed()
        sums = self.sums.zero_()
        if self.graphs is not None and not forward_only:
            self._replay(batches, micro_batches)
        else:
            self._schedule_of(_fan_out(batches, micro_batches, len(self.ddp)), micro_batches, forward_only=forward_only)
        dist.all_reduce(sums, group=self.layout.dp_cp)
        if self.layout.pp.size() > 1:  # only the last stage has a loss
            if not self.layout.is_last_stage_rank:
                sums.zero_()
            dist.all_reduce(sums, group=self.layout.pp)
        return sums

    def _schedule_of(self, sources: list[Iterator[Batch]], micro_batches: int, *, forward_only: bool) -> None:
        """Run megatron's schedule; losses and tokens are added to `sums`."""
        for out in self.run_schedule(self._forward, sources, micro_batches, forward_only=forward_only):
            self.sums[: out["sums"].numel()] += out["sums"]

    def _replay(self, batches: Iterator[Batch], micro_batches: int) -> None:
        """A step's forwards, backwards and reductions in captured graphs: the schedule as a whole, or what it does
        without a pipeline, a micro-batch at a time."""
        assert self.graphs is not None
        context = self.graphs.eager() if self.ctx.probe is not None else nullcontext()
        sizes = self.layout.sizes
        meet = sizes.data > 1 and (sizes.expert > 1 or self.whole)  # ranks with other documents, inside a graph
        taken = [next(batches) for _ in range(micro_batches)] if meet or self.whole else []
        agreed_spans = None
        if meet:
            taken, agreed_spans = agreed(taken, self.spans_of(taken), self.device)
        with context:
            if self.whole:
                self._replay_one(taken, agreed_spans)
                return
            source = iter(taken) if meet else batches
            for _ in range(micro_batches):
                self._replay_one([next(source)], agreed_spans)
        self._finalize(self.ddp)

    def _replay_one(self, batches: list[Batch], spans: Spans | None) -> None:
        """One graph; spans: agreed on with other ranks, or None."""
        assert self.graphs is not None
        with self.bounded(self.spans_of(batches) if spans is None else spans):
            self.graphs.micro_batches(batches, self.spans)

    @contextmanager
    def bounded(self, spans: Spans | None) -> Iterator[None]:
        """These bounds hold for the documents of every micro-batch inside; None: each has its own."""
        self.spans = spans
        try:
            yield
        finally:
            self.spans = None

    def spans_of(self, batches: Sequence[Batch]) -> Spans | None:
        """Bounds on the documents of all of these micro-batches for captured context parallelism, equal on its ranks; None
        without it, or where the borders are no longer on the host."""
        borders = [batch["cu_seqlens"] for batch in batches]
        size = self.layout.sizes.context
        if size == 1 or any(cu.is_cuda for cu in borders):
            return None
        return functools.reduce(Spans.covering, [spans(cu.tolist(), size) for cu in borders])

    def _schedule(self, batches: list[Batch]) -> None:
        """The whole schedule of these micro-batches, on this device, with the reduction of the gradients."""
        self._schedule_of([iter(batches) for _ in self.ddp], len(batches), forward_only=False)
        if self.transport is not None:
            self.transport.join()

    def _one_micro_batch(self, batches: list[Batch]) -> None:
        (batch,) = batches
        self._micro_batch(batch)

    def _micro_batch(self, batch: Batch) -> None:
        """Forward and backward of one micro-batch on this device; its loss and tokens are added to `sums`."""
        losses, loss_func = self._forward(iter([batch]), self.ddp[0])
        loss, _, reported = loss_func(losses)
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=self.device))
        loss.backward()
        self.sums += reported["sums"]

    def step(
        self, batches: Iterator[Batch], lr: float, micro_batches: int, *, max_grad_norm: float = math.inf
    ) -> StepResult:
        """One optimizer step over `micro_batches` of this rank; biases of the routers move once, after the last.

        Nothing moves, on any rank, and the result says skipped, where the loss or the gradient norm is not finite or
        the norm is above `max_grad_norm`. Where the slots of the experts' exchange did not hold every row, the step is
        done again on all ranks with an exchange of the sizes it needs, before anything has moved.
        """
        exchange, wanted = self.ctx.exchange, 0.0
        if exchange.fullest is None:
            applied, sums = self._attempt(batches, lr, micro_batches, max_grad_norm)
        else:
            kept = [next(batches) for _ in range(micro_batches)]
            applied, sums = self._attempt(iter(kept), lr, micro_batches, max_grad_norm)
            if self.gate.again:  # slots were too few: what did not fit is missing in the gradients
                wanted = exchange.capacity_wanted()
                self._forget_counts()
                with self.eager(), exchange.exactly():
                    applied, sums = self._attempt(iter(kept), lr, micro_batches, max_grad_norm)
        loss_sum, tokens, *ahead = sums.tolist()  # the gate has already waited for them
        result = StepResult(loss_sum / max(tokens, 1.0), int(tokens), self.gate.norm)
        if wanted:
            result.extra["moe/capacity_wanted"] = wanted
        if self.qk_clip is not None:
            result.extra |= self.qk_clip.metrics()
        if ahead:
            result.extra["train/mtp_loss"] = ahead[0] / max(ahead[1], 1.0)
        if not applied:
            return self._skipped(result)
        loads = gradients.balance(self.models, self.layout)
        result.load, result.bias_range = self._gather_loads(loads)
        return result

    def _attempt(
        self, batches: Iterator[Batch], lr: float, micro_batches: int, max_grad_norm: float
    ) -> tuple[bool, torch.Tensor]:
        """Gradients of the micro-batches and, where the gate lets them, the update: whether there was one, and `sums`."""
        for model in self.ddp:
            model.train()
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.ctx.exchange.clear()
        sums = self._run_schedule(batches, micro_batches, forward_only=False)
        if self.qk_clip is not None:
            self.qk_clip.measure()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            # megatron leaves this product to a scheduler of its own
            group["weight_decay"] = self.config.optim.weight_decay * group.get("wd_mult", 1.0)
        self.gate.limit = max_grad_norm
        applied, _, _ = self.optimizer.step()
        return applied, sums

    def _skipped(self, result: StepResult) -> StepResult:
        """A step without an update: what its routers counted is forgotten too."""
        result.skipped = True
        self._forget_counts()
        return result

    def _forget_counts(self) -> None:
        for router in gradients.routers(self.models):
            router.forget()

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Without captured graphs while inside: every operation is launched by Python, for traces by part."""
        with nullcontext() if self.graphs is None else self.graphs.eager():
            yield

    def micro_batches(self, samples: int) -> int:
        """Micro-batches of this rank in a global batch of `samples` sequences."""
        return samples // (self.config.train.micro_batch * self.layout.sizes.data)

    def set_probe(self, probe: Callable[[str, torch.Tensor], None] | None) -> None:
        """Hand named intermediate tensors of the next forwards to `probe`; None stops."""
        self.ctx.probe = probe

    def _gather_loads(self, loads: dict[int, torch.Tensor]) -> tuple[torch.Tensor | None, tuple[float, float] | None]:
        """Load of every MoE layer of the model on every rank: [MoE layers, E], and the range of all biases."""
        model = self.config.model
        layers = self.ctx.megatron.num_layers + model.mtp_layers
        table = torch.zeros(layers, model.moe.experts, dtype=torch.int64, device=self.device)
        span = torch.zeros(2, device=self.device)
        for layer, load in loads.items():
            table[layer] = load
        biases = [r.bias for r in gradients.routers(self.models)]
        if biases:
            stacked = torch.stack(biases)
            span = torch.stack([-stacked.min(), stacked.max()]).float()
        if self.layout.pp.size() > 1:
            dist.all_reduce(table, group=self.layout.pp)
            dist.all_reduce(span, op=dist.ReduceOp.MAX, group=self.layout.pp)
        if model.dense_layers >= layers:
            return None, None
        return table[model.dense_layers :].cpu(), (-float(span[0]), float(span[1]))

    def remember_weights(self) -> None:
        """Keep this rank's weights of now, for `weight_change` after the step."""
        self._remembered = {n: p.detach().clone() for m in self.models for n, p in m.named_parameters()}

    @torch.no_grad()
    def weight_change(self) -> tuple[float, float]:
        """L2 norms over the whole model: of what changed since `remember_weights`, and of the weights. Collective."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for model in self.models:
            for name, p in model.named_parameters():
                if is_main_replica(sharded_tensor(name, p, p.k3, self.layout).replica_id):  # count every element once
                    sums[0] += (p - self._remembered[name]).double().square().sum()
                    sums[1] += p.double().square().sum()
        self._remembered = {}
        dist.all_reduce(sums)
        return math.sqrt(float(sums[0])), math.sqrt(float(sums[1]))

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], micro_batches: int) -> tuple[float, int]:
        """Mean loss (nats) over `micro_batches` of this rank and every other, and the tokens counted."""
        for model in self.ddp:
            model.eval()
        loss_sum, tokens, *_ = self._run_schedule(batches, micro_batches, forward_only=True).tolist()
        for model in self.ddp:
            model.train()
        return loss_sum / max(tokens, 1.0), int(tokens)

    # -- state ------------------------------------------------------------------------------------------------------

    def sharded_state(self, *, loading: bool, optimizer: bool = True) -> dict[str, Any]:
        """Model and optimizer as ShardedTensors; the optimizer in megatron's fully reshardable form."""
        state: dict[str, Any] = {"model": model_state(self.models, self.layout)}
        if optimizer:
            state["optimizer"] = self._optimizer_state(self.optimizer, loading=loading)
        return state

    def _optimizer_state(self, optimizer: Any, *, loading: bool, gather_to_one: bool = False) -> Any:
        """gather_to_one: over gloo to the first data-parallel rank, apart from the groups that training uses."""
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": gather_to_one,
        }
        if not self.shards_state:
            if loading:
                plain_state.allocate(optimizer)
            return plain_state.sharded(optimizer, self.models, self.layout)
        model = model_state(self.models, self.layout)
        return optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)

    def save(
        self, folder: Path, state: dict[str, Any], *, seal: Callable[[Checksums], None] | None = None, wait: bool = True
    ) -> None:
        """Write this rank's shards into `folder` (exists, empty); `state` is small and equal on every rank.

        `seal` runs on rank 0 when all ranks have written. wait=False returns once the tensors are copied: ask
        `poll_save` at the borders of later steps. Raises CheckpointError, on every rank, where one could not write.
        """
        if self.config.parallel.overlap_param_gather:
            for model in self.ddp:  # the weights of the last step are gathered when the next one needs them, or now
                model.start_param_sync(force_sync=True)
        if self._first_save:
            # megatron collects garbage in every save: what exists by now is here to stay and need not be looked at
            gc.collect()
            gc.freeze()
            self._first_save = False
        if wait:
            self.saver.save({**self.sharded_state(loading=False), "state": state}, folder, seal)
        else:
            self.saver.start(self._state_of_now(state), folder, seal)

    def _state_of_now(self, state: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """Copies of everything that the next step will change, and the work of turning them into a checkpoint."""
        copies = HostCopies()
        twin = optimizer_twin(self.optimizer, copies) if self.shards_state else None
        optimizer = self._optimizer_state(self.optimizer, loading=False) if twin is None else None
        if optimizer is not None and not self.shards_state:
            for shard in optimizer["tensors"].values():
                shard.data = copies.copy(shard.data) if is_main_replica(shard.replica_id) else shard.data
        shards = model_state(self.models, self.layout)
        held = {name: copies.copy(s.data) for name, s in shards.items() if is_main_replica(s.replica_id)}
        copies.wait()

        def content() -> dict[str, Any]:
            of_optimizer = optimizer if twin is None else self._optimizer_state(twin, loading=False, gather_to_one=True)
            for name, shard in shards.items():
                shard.data = held.get(name, shard.data)
            return {"model": shards, "optimizer": of_optimizer, "state": state}

        return content

    def poll_save(self, *, wait: bool = False) -> Path | None:
        """The folder of a background save that every rank has finished since the last call. Collective; raises as
        `save` does."""
        return self.saver.poll(wait=wait)

    def load(self, folder: Path, *, optimizer: bool = True) -> dict[str, Any]:
        """Read a checkpoint written under any layout; returns the small state saved beside it."""
        wanted = self.sharded_state(loading=True, optimizer=optimizer)
        try:
            loaded = dist_checkpointing.load(wanted, str(folder))
        except (KeyError, CheckpointingException, CheckpointException) as error:  # the last is torch's
            what = str(error).strip().splitlines()[-1]
            raise CheckpointError(
                f"{folder} does not hold what this run asks for ({what}): it was written by another model, or its "
                "optimizer kept its state otherwise (optim.name, parallel.distributed_optimizer); type these as they "
                "were, or start another run from its weights alone: run.name=OTHER checkpoint.load=... "
                "checkpoint.load_optimizer=false"
            ) from error
        with torch.no_grad():
            for model in self.models:
                for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                    if getattr(tensor, "k3", None) is not None:
                        tensor.copy_(loaded["model"][f"model.{name}"])
            if optimizer:
                self._restore_optimizer(loaded["optimizer"])
            else:
                self.optimizer.reload_model_params()
        return loaded["state"]

    def _restore_optimizer(self, state: Any) -> None:
        if self.shards_state:
            # a checkpoint brings state; betas, epsilon and the like are what the configuration says now
            here = [{k: v for k, v in g.items() if k not in ("params", "step")} for g in self.optimizer.param_groups]
            self.optimizer.load_state_dict(state)
            for group, settings in zip(self.optimizer.param_groups, here):
                group.update(settings)
        else:
            plain_state.restore(self.optimizer, self.models, state)

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter whole on CPU, on every rank (small models: parity tests and checks)."""
        local = {n: (p.detach(), p.k3) for m in self.models for n, p in m.named_parameters()}
        return gather_full(local, self.layout)

    def agree(self, flag: int) -> int:
        """The largest flag any rank raised: one small all-reduce, so that all ranks stop at the same step."""
        value = torch.tensor([flag], dtype=torch.int32, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value.item())


def gather_full(local: dict[str, tuple[torch.Tensor, Any]], layout: Layout) -> dict[str, torch.Tensor]:
    """Whole tensors by name from every rank's shards (name -> (shard, spec)), on CPU, on every rank."""
    pieces = {}
    for name, (tensor, spec) in local.items():
        place = layout.ep.rank() if spec.expert else layout.tp.rank()
        pieces[name] = (tensor.cpu(), 0 if spec.expert else spec.tensor_axis, place)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces)
    shards: dict[str, dict[int, torch.Tensor]] = {}
    axes: dict[str, int | None] = {}
    for rank_pieces in everyone:
        for name, (tensor, axis, place) in rank_pieces.items():
            axes[name] = axis
            shards.setdefault(name, {})[place] = tensor
    return {
        n: s[0] if (axis := axes[n]) is None else torch.cat([s[i] for i in sorted(s)], dim=axis)
        for n, s in shards.items()
    }


def _fan_out(batches: Iterator[Batch], micro_batches: int, chunks: int) -> list[Iterator[Batch]]:
    """One iterator a model chunk over the same micro-batches (every virtual stage needs the boundaries)."""
    if chunks == 1:
        return [batches]
    kept = [next(batches) for _ in range(micro_batches)]
    return [iter(kept) for _ in range(chunks)]
