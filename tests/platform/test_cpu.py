"""The adapter in use: what it changes for megatron, what it leaves alone for others, and what gloo gains."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from k3train.platform import cpu

ROOT = Path(__file__).resolve().parents[2]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the adapter does nothing on a machine with a GPU")


def run_python(code: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that has imported nothing yet and sees no GPU."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def guest(code: str) -> dict[str, object]:
    """Execute `code` as if it stood in a module of megatron; returns its names."""
    names: dict[str, object] = {"__name__": "megatron.core.example", "torch": torch}
    exec(textwrap.dedent(code), names)
    return names


@without_gpu
def test_install_is_idempotent() -> None:
    assert cpu.install() is True
    zeros = torch.zeros
    assert cpu.install() is True
    assert torch.zeros is zeros, "a second call must not wrap the wrappers"
    assert cpu.installed()


def test_install_after_megatron_is_refused_with_the_cure() -> None:
    # A stand-in for megatron.core in sys.modules: importing the real one takes ten seconds and shows no more.
    result = run_python("""
        import sys, types
        sys.modules["megatron.core"] = types.ModuleType("megatron.core")
        from k3train.errors import EnvironmentError_
        from k3train.platform import cpu
        try:
            cpu.install()
        except EnvironmentError_ as error:
            print("refused:", error)
        """)
    assert "refused:" in result.stdout, result.stderr
    assert "before the first `import megatron.core`" in result.stdout


def test_a_machine_with_a_gpu_is_left_alone() -> None:
    result = run_python("""
        import torch
        torch.cuda.is_available = lambda: True
        before = (torch.zeros, torch.Tensor.type, torch.cuda.current_device, torch.distributed.all_reduce)
        from k3train.platform import cpu
        assert cpu.install() is False and not cpu.installed()
        assert before == (torch.zeros, torch.Tensor.type, torch.cuda.current_device, torch.distributed.all_reduce)
        """)
    assert result.returncode == 0, result.stderr


@without_gpu
@pytest.mark.parametrize("factory", ["zeros", "ones", "empty", "full", "tensor", "arange"])
def test_the_meta_device_context_still_reaches(factory: str) -> None:
    cpu.install()
    arguments = {"full": ((2,), 1.0), "tensor": ([1.0, 2.0],), "arange": (2,)}.get(factory, (2,))
    with torch.device("meta"):
        assert getattr(torch, factory)(*arguments).device.type == "meta"
        assert torch.nn.Linear(2, 2).weight.device.type == "meta"
    assert getattr(torch, factory)(*arguments).device.type == "cpu"


@without_gpu
def test_megatron_gets_the_cpu_where_it_names_the_gpu() -> None:
    cpu.install()
    names = guest("""
        zeros = torch.zeros(2, device="cuda")
        here = torch.ones(2, device=torch.cuda.current_device())
        pinned = torch.empty(2, pin_memory=True)
        moved = torch.ones(2).cuda()
        count = torch.cuda.device_count()
        kinds = [torch.zeros(1, dtype=d).type() for d in (torch.float32, torch.bfloat16, torch.float16)]
        """)
    for name in ("zeros", "here", "pinned", "moved"):
        assert names[name].device.type == "cpu"  # type: ignore[attr-defined]
    assert names["count"] == 1
    assert names["kinds"] == ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", "torch.cuda.HalfTensor"]


@without_gpu
def test_other_callers_keep_the_torch_they_know() -> None:
    cpu.install()
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.cuda.device_count() == 0
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


@without_gpu
def test_seeding_and_random_states_are_those_of_the_cpu() -> None:
    cpu.install()
    torch.cuda.manual_seed(5)
    first = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), first)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


@without_gpu
def test_streams_and_events_are_complete_at_once() -> None:
    cpu.install()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        event = stream.record_event()
    event.wait()
    assert event.query() and event.elapsed_time(torch.cuda.Event(enable_timing=True)) == 0.0


def _collectives(rank: int, rendezvous: str) -> None:
    cpu.install()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    average = dist.ReduceOp.AVG

    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x, op=average)
    assert x.tolist() == [1.5] * 3

    x = torch.full((3,), float(rank + 1))
    handle = dist.all_reduce(x, op=average, async_op=True)
    handle.wait()
    handle.wait()  # waiting twice must not divide twice
    assert x.tolist() == [1.5] * 3

    out = torch.empty(2)
    dist.reduce_scatter_tensor(out, torch.arange(4.0) * (rank + 1), op=average)
    assert out.tolist() == [[0.0, 1.5], [3.0, 4.5]][rank]

    x, y = torch.full((2,), float(rank + 1)), torch.full((2,), float(rank + 3))
    with dist.distributed_c10d._coalescing_manager(None):
        dist.all_reduce(x, op=average)
        dist.all_reduce(y, op=average)
    assert (x.tolist(), y.tolist()) == ([1.5] * 2, [3.5] * 2)

    # Rank 0 keeps 1 and sends 2; rank 1 sends 3 and keeps 1: sizes as tensors, as the expert dispatcher has them.
    send = torch.tensor([[1, 2], [3, 1]])
    inputs = torch.arange(float(send[rank].sum())) + 10 * rank
    outputs = torch.empty(int(send[:, rank].sum()))
    dist.all_to_all_single(outputs, inputs, send[:, rank].contiguous(), send[rank])
    assert outputs.tolist() == [[0.0, 10.0, 11.0, 12.0], [1.0, 2.0, 13.0]][rank]

    for async_op in (False, True):
        pieces = [torch.empty(1), torch.empty(3)]
        handle = dist.all_gather(pieces, torch.full((1 + 2 * rank,), float(rank)), async_op=async_op)
        if async_op:
            handle.wait()
        assert [p.tolist() for p in pieces] == [[0.0], [1.0, 1.0, 1.0]]
    dist.destroy_process_group()


@without_gpu
def test_gloo_gains_means_tensor_splits_and_uneven_gathers() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_collectives, args=(f"{folder}/rendezvous",), nprocs=2)


@without_gpu
def test_megatron_trains_one_step_under_the_adapter() -> None:
    """DDP, the distributed optimizer, the random-state tracker and a schedule, in one process, against torch."""
    result = run_python("""
        import os, tempfile
        from k3train.platform import install, install_adam
        assert install()
        import torch, torch.distributed as dist
        import megatron.core.parallel_state as ps
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.enums import ModelType
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import MegatronModule
        assert install_adam() and install_adam()
        dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
        ps.initialize_model_parallel(distributed_timeout_minutes=1)
        model_parallel_cuda_manual_seed(1)
        with get_cuda_rng_tracker().fork():
            torch.rand(1)
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1,
                                   gradient_accumulation_fusion=False, finalize_model_grads_func=finalize_model_grads)

        class Model(MegatronModule):
            def __init__(self):
                super().__init__(config)
                self.model_type = ModelType.encoder_or_decoder
                self.linear = ColumnParallelLinear(4, 8, config=config, init_method=torch.nn.init.ones_, bias=False)
            def set_input_tensor(self, tensor): pass
            def forward(self, x): return self.linear(x)[0]

        net = Model()
        twin = torch.nn.Parameter(net.linear.weight.detach().clone())
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), net)
        options = OptimizerConfig(optimizer="adam", lr=0.1, weight_decay=0.1, clip_grad=1.0,
                                  use_distributed_optimizer=True)
        optimizer = get_megatron_optimizer(options, [ddp])
        reference = torch.optim.AdamW([twin], lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, foreach=True)
        x = torch.arange(8.0).view(2, 4) / 8

        def forward(iterator, model):
            return model(next(iterator)), lambda out: (out.square().mean(), {})

        for _ in range(3):
            ddp.zero_grad_buffer(); optimizer.zero_grad()
            get_forward_backward_func()(forward_step_func=forward, data_iterator=iter([x, x]), model=[ddp],
                                        num_microbatches=2, seq_length=2, micro_batch_size=1, forward_only=False)
            ok, norm, _ = optimizer.step()
            reference.zero_grad(); (x @ twin.t()).square().mean().backward()
            total = torch.nn.utils.clip_grad_norm_([twin], 1.0)
            reference.step()
            assert ok and abs(norm - total.item()) < 1e-6 * total.item(), (norm, total)
            assert torch.allclose(net.linear.weight, twin, rtol=1e-6, atol=0), (net.linear.weight - twin).abs().max()
        print("trained", [g["step"] for g in optimizer.param_groups])
        """)
    assert "trained [3]" in result.stdout, result.stderr[-3000:]
    assert "UserWarning" not in result.stderr, result.stderr
