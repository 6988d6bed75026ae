"""The DeepSpeed engine: ZeRO-1, 2 and 3 over data-parallel ranks, with or without optimizer state in CPU memory.

It trains the same modules as the megatron engine, uncut. DeepSpeed sees a torch model whose parameters have two dtypes
(bf16, and fp32 where K3 keeps fp32) and a torch optimizer. What it averages over ranks and adds up over micro-batches
must become the gradient of the mean over the tokens of the whole global batch: the loss handed to its backward is scaled
by the power of two nearest to that, which moves no bit of a bf16 gradient, and the rest is its loss scale, divided out of
the fp32 sums together with clipping.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from k3train.config.activations import policies
from k3train.config.schema import Config
from k3train.engine import deepspeed_state, gradients
from k3train.engine.base import Batch, StepResult
from k3train.engine.deepspeed_gate import NormGate
from k3train.engine.deepspeed_optimizer import ZeroMuon, build_optimizer
from k3train.engine.deepspeed_saving import Checksums, UniversalSaver, load_universal
from k3train.errors import EnvironmentError_
from k3train.model.build import build_chunks, chunks_of_rank, make_context
from k3train.model.context import PackedStream
from k3train.model.k3 import K3Model
from k3train.parallel.layout import Layout

OFFLOADED_BYTES = 16  # a parameter: fp32 weight, gradient and two moments
BUCKET = 200_000_000  # elements that are reduced together
LARGEST_BUCKET = 1_000_000_000  # where one parameter alone has more: what is longer is reduced as it is, in bf16


def require() -> Any:
    """The deepspeed package, quiet and told which device it runs on. Raises EnvironmentError_ when it is missing."""
    if importlib.util.find_spec("deepspeed") is None:
        raise EnvironmentError_(
            "engine=deepspeed needs the deepspeed package, which is an extra: type `DS_BUILD_OPS=0 uv sync --extra "
            "deepspeed` (or `DS_BUILD_OPS=0 pip install --no-build-isolation 'k3train[deepspeed]'`), or engine=megatron"
        )
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # its shared-memory collectives for CPU ranks are compiled at first use, which takes minutes; gloo's do the same
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextmanager
def _partitions_of_two_dtypes() -> Iterator[None]:
    """ZeRO-3 lays the partitions of all parameters end to end in one tensor; here in one tensor a dtype."""
    from deepspeed.runtime.zero import stage3

    defragment = stage3.defragment

    def lay(tensors: list[torch.Tensor]) -> torch.Tensor:
        """As DeepSpeed's, without its way through host memory where the device has room for all of them twice."""
        total, first = sum(t.numel() for t in tensors), tensors[0]
        if first.is_cuda and torch.cuda.mem_get_info(first.device)[0] < 1.1 * total * first.element_size():
            return defragment(tensors)
        buffer = torch.empty(total, dtype=first.dtype, device=first.device)
        start = 0
        for tensor in tensors:
            place = buffer.narrow(0, start, tensor.numel())
            tensor.data = place.copy_(tensor.reshape(-1))
            start += place.numel()
        return buffer

    class Buffers:
        """One buffer a dtype, one after the other, as the parameter groups are."""

        def __init__(self, tensors: list[torch.Tensor]) -> None:
            dtypes = dict.fromkeys(t.dtype for t in tensors)
            self.parts = [lay([t for t in tensors if t.dtype == dtype]) for dtype in dtypes]

        def narrow(self, _axis: int, start: int, length: int) -> torch.Tensor:
            for part in self.parts:
                if start < part.numel():
                    return part.narrow(0, start, length)
                start -= part.numel()
            return self.parts[-1].narrow(0, self.parts[-1].numel(), 0)

    stage3.defragment = Buffers
    try:
        yield
    finally:
        stage3.defragment = defragment


def _keep_gradients_once(zero: Any) -> None:
    """With state in host memory ZeRO-3 adds gradients up in a buffer, and copies that to where the optimizer reads.

    Here they add up where the optimizer reads: 4 bytes a parameter less, and one way less over the bus.
    """
    places = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    for group, flat in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        for p in group:
            _, start, _ = zero.grad_position[zero.get_param_id(p)]
            places[p.ds_id] = flat.grad.narrow(0, start, p.partition_numel())
    zero.grad_partitions_flat_buffer = torch.empty(0, dtype=zero.gradient_accumulation_dtype)

    def measure(param: Any, gradient: torch.Tensor, *_: Any) -> None:
        zero.norm_for_param_grads[zero.get_param_id(param)] = zero._constant_buffered_norm2(gradient)

    zero._offload_grad_partition_at_boundary = measure


class DeepSpeedEngine:
    """One rank's share of a model that ZeRO divides. Answers the verbs of `k3train.engine.base.Engine`."""

    def __init__(self, config: Config, layout: Layout, device: torch.device) -> None:
        require()
        from k3train.engine.megatron import training_dtype

        self.config, self.layout, self.device = config, layout, device
        self.stage = config.engine.zero_stage
        dtype = training_dtype(config.train.precision, device)
        model = config.model
        if model.backend == "auto" and device.type == "cuda":
            # transformer-engine's modules keep tensors of their weights' making, and were not run under ZeRO-3
            model = dataclasses.replace(model, backend="torch")
        self.ctx = make_context(
            model, layout, dtype, device, recompute=config.train.recompute,
            recompute_layers=config.train.recompute_layers, activations=policies(config.train),
        )  # fmt: skip
        chunks = chunks_of_rank(config.model, layout.sizes, 0, None)
        self.models: list[K3Model] = build_chunks(self.ctx, chunks, seed=config.run.seed)
        self.model = self.models[0]
        self.names = dict(self.model.named_parameters())
        for parameter in self.names.values():
            parameter.allreduce = True  # every rank has all experts: no groups of their own, which False asks for
        self.engine = self._initialize()
        self.ddp = [self.engine]  # what callbacks put into eval mode and run forwards with
        self.optimizer = self.engine.optimizer
        if isinstance(self.optimizer.optimizer, ZeroMuon):
            self.optimizer.optimizer.engine = self
        self.gate = NormGate(self.optimizer, self.stage)
        self.saver = UniversalSaver()
        self._remembered: dict[str, torch.Tensor] = {}

    # -- building ---------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """The configuration that DeepSpeed is given."""
        e, train = self.config.engine, self.config.train
        cuda, sizes = self.device.type == "cuda", [p.numel() for p in self.names.values()]
        elements = sum(sizes)
        bucket = min(max(BUCKET, min(max(sizes), LARGEST_BUCKET)), elements + 4096)
        zero: dict[str, Any] = {
            "stage": e.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket - bucket % 2,
            "overlap_comm": cuda and e.zero_stage > 1,
            "contiguous_gradients": True,
            "stage3_prefetch_bucket_size": min(50_000_000, bucket),
            # kernels read vectors of several modules at once (a mix over depth and the norm behind it), where ZeRO-3
            # gathers for one module at a time: vectors as long as the model is wide stay whole
            "stage3_param_persistence_threshold": max(e.persistent_numel, self.config.model.hidden_size),
            # one flat partition a parameter group: nothing here is large enough to need swapping in pieces
            "sub_group_size": 1_000_000_000,
        }
        if e.offload == "cpu":
            # pinning copies and cannot be swapped: only where it leaves the host most of its memory
            pin = cuda and OFFLOADED_BYTES * elements < psutil.virtual_memory().total / 4
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pin}
        return {
            "train_micro_batch_size_per_gpu": train.micro_batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.config.optim.clip_grad,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1 << 40,
        }

    def _initialize(self) -> Any:
        import deepspeed
        from deepspeed.runtime.config import DeepSpeedConfig
        from deepspeed.runtime.engine import DeepSpeedEngine as Engine

        os.environ.setdefault("LOCAL_RANK", str(self.device.index or 0))  # it insists, and reads the device from it
        deepspeed.init_distributed(
            dist_backend="nccl" if self.device.type == "cuda" else "gloo", dist_init_required=False,
            auto_mpi_discovery=False, verbose=False,
        )  # fmt: skip
        settings = self.settings()
        optimizer = build_optimizer(self.config, self.names, self.layout, self.device)
        with _partitions_of_two_dtypes():
            engine = Engine(
                args=None, model=self.model, optimizer=optimizer, model_parameters=None, mpu=None,
                dist_init_required=False, config=settings, config_class=DeepSpeedConfig(settings),
            )  # fmt: skip
        if self.stage == 3:
            self._keep_what_is_recomputed(engine.optimizer.parameter_offload.get_param_coordinator())
            stay = engine.optimizer.persistent_parameters
            if self.config.engine.offload == "cpu":
                _keep_gradients_once(engine.optimizer)
            if stay:  # whole from the start, not from their first use on: that may be by another module's kernel
                stay[0].all_gather(stay)
        if self.stage == 1 and self.ctx.dtype != torch.float32:
            # micro-batches of bf16 gradients add up in fp32, as stages 2 and 3 do in their buckets by themselves
            engine.optimizer.use_grad_accum_attribute = engine.optimizer.use_separate_grad_accum = True
        return engine

    def _keep_what_is_recomputed(self, coordinator: Any) -> None:
        """A forward that runs again inside a backward gathers parameters which that backward is about to use: they are
        let go when it has, not when the forward ends."""
        release = coordinator.release_sub_module

        def unless_recomputing(submodule: torch.nn.Module, forward: bool = False) -> None:
            if not (forward and self.ctx.recomputing):
                release(submodule, forward=forward)

        coordinator.release_sub_module = unless_recomputing

    # -- stepping ---------------------------------------------------------------------------------------------------

    def _to_device(self, batch: Batch) -> Batch:
        return {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}

    def _stream(self, batch: Batch) -> PackedStream:
        stream = PackedStream(
            batch["cu_seqlens"], batch["tokens"].shape[0], sequence_length=self.config.train.seq_length
        )
        stream.loss_weight = batch["loss_mask"]
        if "valid" in batch:
            stream.valid = batch["valid"]
        return stream

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        """Sum of the losses of a micro-batch's counted tokens."""
        loss = self.engine(batch["tokens"], batch["labels"], self._stream(batch))
        return (loss * batch["loss_mask"]).sum()

    def _pool(self, sums: torch.Tensor) -> torch.Tensor:
        if dist.get_world_size() > 1:
            dist.all_reduce(sums, group=self.layout.dp)
        return sums

    def step(
        self, batches: Iterator[Batch], lr: float, micro_batches: int, *, max_grad_norm: float = math.inf
    ) -> StepResult:
        """One optimizer step over `micro_batches` of this rank; biases of the routers move once, after the last.

        Nothing moves, on any rank, and the result says skipped, where the loss or the gradient norm is not finite or
        the norm is above `max_grad_norm`.
        """
        self.engine.train()
        taken = [self._to_device(next(batches)) for _ in range(micro_batches)]
        counted = torch.stack([b["loss_mask"].sum() for b in taken]).double()
        tokens = int(self._pool(counted.sum()))
        # DeepSpeed averages gradients over ranks; the mean wanted is over tokens
        weight = self.layout.sizes.data / max(tokens, 1)
        power = 2.0 ** round(math.log2(weight))
        self._scale_auxiliary_loss(power)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, batch in enumerate(taken):
            self.engine.set_gradient_accumulation_boundary(i == micro_batches - 1)
            loss = self._loss_sum(batch)
            total += loss.detach().double()
            self.engine.backward(loss * power)
        result = StepResult(float(self._pool(total)) / max(tokens, 1), tokens)
        for group in self.optimizer.optimizer.param_groups:
            group["lr"] = lr
        self.gate.limit = max_grad_norm if math.isfinite(result.loss) else -math.inf
        self.gate.scale = self.optimizer.loss_scale = power / weight
        self.engine.step()
        self.optimizer.loss_scale = 1.0  # or the next backward would multiply by it
        result.grad_norm = self.gate.norm
        if self.gate.refused:
            result.skipped = True
            for router in gradients.routers(self.models):
                router.load = router.counts = None
            return result
        loads = gradients.balance(self.models, self.layout)
        if loads:
            result.load = torch.stack([loads[layer] for layer in sorted(loads)]).cpu()
            biases = torch.stack([r.bias for r in gradients.routers(self.models)])
            result.bias_range = float(biases.min()), float(biases.max())
        return result

    def _scale_auxiliary_loss(self, weight: float) -> None:
        if self.config.model.balancing == "aux_loss":
            from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

            MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(weight, device=self.device))

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], micro_batches: int) -> tuple[float, int]:
        """Mean loss (nats) over `micro_batches` of this rank and every other, and the tokens counted."""
        self.engine.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for _ in range(micro_batches):
            batch = self._to_device(next(batches))
            sums[0] += self._loss_sum(batch).double()
            sums[1] += batch["loss_mask"].sum().double()
        self.engine.train()
        self._pool(sums)
        return float(sums[0]) / max(float(sums[1]), 1.0), int(sums[1])

    @torch.no_grad()
    def run_schedule(
        self, forward: Callable[..., Any], sources: list[Any], micro_batches: int, *, forward_only: bool,
        collect_non_loss_data: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Forwards alone, in megatron's form: `forward(source, model)` gives an output and what to do with it."""
        assert forward_only, "gradients are taken by step"
        collected = []
        for _ in range(micro_batches):
            output, take = forward(sources[0], self.engine)
            collected.append(take(output, non_loss_data=True) if collect_non_loss_data else take(output))
        return collected

    def micro_batches(self, samples: int) -> int:
        """Micro-batches of this rank in a global batch of `samples` sequences."""
        return samples // (self.config.train.micro_batch * self.layout.sizes.data)

    def set_probe(self, probe: Callable[[str, torch.Tensor], None] | None) -> None:
        """Hand named intermediate tensors of the next forwards to `probe`; None stops."""
        self.ctx.probe = probe

    def remember_weights(self) -> None:
        """Keep this rank's part of the fp32 weights of now, for `weight_change` after the step."""
        self._remembered = {p.name: p.fp32().clone() for p in deepspeed_state.pieces(self)}

    @torch.no_grad()
    def weight_change(self) -> tuple[float, float]:
        """L2 norms over the whole model: of what changed since `remember_weights`, and of the weights. Collective."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for piece in deepspeed_state.pieces(self):
            weights = piece.fp32()
            sums[0] += (weights - self._remembered[piece.name]).double().square().sum().to(self.device)
            sums[1] += weights.double().square().sum().to(self.device)
        self._remembered = {}
        self._pool(sums)
        return math.sqrt(float(sums[0])), math.sqrt(float(sums[1]))

    # -- state ------------------------------------------------------------------------------------------------------

    def save(
        self, folder: Path, state: dict[str, Any], *, seal: Callable[[Checksums], None] | None = None, wait: bool = True
    ) -> None:
        """Write a universal checkpoint into `folder` (exists, empty); `state` is small and equal on every rank.

        `seal` runs on rank 0 when all ranks have written. wait=False returns once the tensors are copied: ask
        `poll_save` at the borders of later steps. Raises CheckpointError, on every rank, where one could not write.
        """
        self.saver.write(self, folder, state, seal, wait=wait)

    def poll_save(self, *, wait: bool = False) -> Path | None:
        """The folder of a background save that every rank has finished since the last call. Collective; raises as
        `save` does."""
        return self.saver.poll(wait=wait)

    def load(self, folder: Path, *, optimizer: bool = True) -> dict[str, Any]:
        """Read a universal checkpoint written by any number of ranks and any stage; returns the small state."""
        return load_universal(self, folder, optimizer=optimizer)

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter whole on CPU, on every rank, in the model's dtypes (small models: checks and tests)."""
        whole = deepspeed_state.gather(self, "fp32")
        return {name: whole[name].to(p.dtype) for name, p in self.names.items()}

    def agree(self, flag: int) -> int:
        """The largest flag any rank raised: one small all-reduce, so that all ranks stop at the same step."""
        value = torch.tensor([flag], dtype=torch.int32, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value.item())
