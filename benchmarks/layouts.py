"""Two GPUs under every kind of parallelism against one: losses in bf16, step time, bytes moved.

    python benchmarks/layouts.py                  # starts its own ranks; needs 2 CUDA devices
    python benchmarks/layouts.py --json out.json

One GPU runs first, in two orders of reduction: as it is, and with the micro-batches of a step permuted and every
row-parallel product summed as two bf16 halves, which is the arithmetic of two tensor ranks. The largest difference
between those runs is the noise that a layout is held to (times 4). Then TP2, PP2 with
2 virtual stages, EP2, CP2 and DP2 run the same steps on two GPUs (`--exchanges`: EP2 through each of our own exchanges).
Bytes are counted at torch.distributed's door, per rank and step, for what this rank sends: an all-reduce counts its
tensor once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SP": {"tensor": 2},
    "PP2 VPP2": {"pipeline": 2, "virtual": 2},
    "EP2": {"expert": 2},
    "CP2": {"context": 2},
    "DP2": {},
}
SLOTS = {"expert": 2, "expert_exchange": "slots"}
EXCHANGES: dict[str, dict[str, Any]] = {
    "EP2 sized": {"expert": 2, "expert_exchange": "sized", "overlap_experts": True},
    "EP2 slots": {**SLOTS, "overlap_experts": True},
    "EP2 slots captured": {**SLOTS, "overlap_experts": True, "cuda_graphs": "step"},
    "EP2 slots overflowing": {**SLOTS, "expert_capacity": 1.0, "cuda_graphs": "step"},
}
"""Our own exchanges of experts' rows; `cuda_graphs` belongs to train."""

STEPS, TIMED, WARMUP = 3, 3, 0
SEQUENCE, GLOBAL = 2048, 4


def make_config(parallel: dict[str, Any], hidden: int) -> Any:
    from k3train.config.schema import (
        Config,
        KDAConfig,
        MLAConfig,
        ModelConfig,
        MoEConfig,
        OptimConfig,
        ParallelConfig,
        RunConfig,
        TrainConfig,
    )

    heads = hidden // 128
    parallel = dict(parallel)
    graphs = parallel.pop("cuda_graphs", "none")
    model = ModelConfig(
        name="layouts", vocab_size=16384, hidden_size=hidden, pattern="KKKF*2 F", dense_hidden=4 * hidden,
        residual_block=3, kda=KDAConfig(heads=heads, head_dim=128),
        mla=MLAConfig(heads=heads, q_lora_rank=384, kv_lora_rank=512, nope_dim=128, shared_dim=64, v_dim=128),
        moe=MoEConfig(experts=32, top_k=4, shared_experts=2, expert_hidden=hidden // 2, latent=hidden // 2),
    )  # fmt: skip
    return Config(
        run=RunConfig(name="layouts", seed=1), model=model, parallel=ParallelConfig(**parallel),
        optim=OptimConfig(lr=1e-4),
        train=TrainConfig(seq_length=SEQUENCE, micro_batch=1, global_batch=GLOBAL, precision="bf16",
                          cuda_graphs=graphs),
    )  # fmt: skip


def batches(config: Any, dp_rank: int, dp_size: int, step: int, order: int) -> Iterator[dict[str, Any]]:
    """Micro-batches of one step for one data-parallel rank; `order` permutes which micro-batch holds which sample."""
    import torch

    count = config.train.global_batch // dp_size
    samples = list(range(config.train.global_batch))
    if order:
        generator = torch.Generator().manual_seed(order)
        samples = torch.randperm(len(samples), generator=generator).tolist()
    for m in range(count):
        index = samples[m * dp_size + dp_rank]
        generator = torch.Generator().manual_seed(10_000 * step + index)
        tokens = torch.randint(0, config.model.vocab_size, (SEQUENCE + 1,), generator=generator)
        cuts = sorted(torch.randint(1, SEQUENCE, (3,), generator=generator).unique().tolist())
        mask = torch.ones(SEQUENCE)
        mask[[c - 1 for c in cuts]] = 0
        cu = torch.tensor([0, *cuts, SEQUENCE], dtype=torch.int32)
        yield {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "cu_seqlens": cu}


class Traffic:
    """Counts bytes that this rank hands to torch.distributed."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self.bytes = 0

        def wrap(owner: Any, name: str, tensor_at: int) -> None:
            real = getattr(owner, name)

            def counted(*args: Any, **options: Any) -> Any:
                value = args[tensor_at] if len(args) > tensor_at else None
                if isinstance(value, torch.Tensor):
                    self.bytes += value.numel() * value.element_size()
                return real(*args, **options)

            setattr(owner, name, counted)

        for name, at in (("all_reduce", 0), ("all_gather_into_tensor", 1), ("reduce_scatter_tensor", 1),
                         ("all_to_all_single", 1), ("isend", 0), ("send", 0), ("all_gather", 1)):  # fmt: skip
            wrap(dist, name, at)
        real_p2p = dist.P2POp

        class Counted(real_p2p):  # type: ignore[misc, valid-type]
            def __init__(op, function: Any, tensor: Any, *args: Any, **options: Any) -> None:  # noqa: N805
                if function.__name__ in ("isend", "counted"):
                    self.bytes += tensor.numel() * tensor.element_size()
                super().__init__(function, tensor, *args, **options)

            def __new__(cls, *args: Any, **options: Any) -> Any:
                return object.__new__(cls)

        dist.P2POp = Counted


def worker(job: dict[str, Any]) -> None:
    """One rank: run the jobs' layouts in turn and write what rank 0 saw."""
    import torch
    import torch.distributed as dist

    from k3train.platform import install_adam, quieten

    quieten()
    rank = int(os.environ.get("RANK", "0"))
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    install_adam()
    from k3train.engine.megatron import MegatronEngine
    from k3train.model.backend.local import Row
    from k3train.parallel import layout as layouts

    plain = Row.forward

    def in_halves(self: Any, x: Any) -> Any:
        left, right = x.chunk(2, -1)
        a, b = self.weight.chunk(2, 1)
        return torch.nn.functional.linear(left, a) + torch.nn.functional.linear(right, b)

    traffic = Traffic()
    results = {}
    for name, parallel, order in job["runs"]:
        config = make_config(parallel, job["hidden"])
        Row.forward = in_halves if order else plain
        layout = layouts.initialize(layouts.sizes_from_config(config.parallel, dist.get_world_size()))
        engine = MegatronEngine(config, layout, torch.device("cuda", rank))
        micro = engine.micro_batches(GLOBAL)

        def step(number: int, order: int, engine: Any = engine, layout: Any = layout, micro: int = micro) -> Any:
            source = batches(engine.config, layout.dp.rank(), layout.sizes.data, number, order)
            return engine.step(source, 1e-4, micro)

        seen = [(r.loss, r.grad_norm) for r in (step(i, order) for i in range(STEPS))]
        for i in range(WARMUP):
            step(i, order)
        times = []
        torch.cuda.reset_peak_memory_stats()
        traffic.bytes = 0
        for i in range(TIMED):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step(i, order)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        results[name] = {
            "losses": [s[0] for s in seen], "grad_norms": [s[1] for s in seen],
            "milliseconds": statistics.median(times) * 1e3, "sent_mb_per_step": traffic.bytes / TIMED / 1e6,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        }  # fmt: skip
        if engine.graphs is not None:
            engine.graphs.close()
        del engine, step
        torch.cuda.empty_cache()
    if rank == 0:
        Path(job["out"]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def launch(ranks: int, runs: list[tuple[str, dict[str, Any], int]], hidden: int) -> dict[str, Any]:
    """Start `ranks` processes of this script and return rank 0's results. Raises RuntimeError with a rank's output."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        job = json.dumps({"runs": runs, "hidden": hidden, "out": str(out)})
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                   __file__, "--job", job]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        if done.returncode or not out.is_file():
            raise RuntimeError(
                f"{ranks} ranks ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
            )
        return json.loads(out.read_text())


def measure(hidden: int = 1024, on_two: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """The reference runs on one GPU, every layout (of `on_two`, else LAYOUTS) on two, and the noise to judge by."""
    reference = launch(1, [(f"order {order}", {}, order) for order in (0, 1)], hidden)
    runs = list(reference.values())
    spread = {
        key: max(abs(a[key][i] - b[key][i]) for a in runs for b in runs for i in range(STEPS))
        for key in ("losses", "grad_norms")
    }
    layouts = launch(2, [(name, parallel, 0) for name, parallel in (on_two or LAYOUTS).items()], hidden)
    return {"one": runs[0], "spread": spread, "layouts": layouts, "hidden": hidden}


def deviations(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Largest difference of each layout from one GPU, over the steps."""
    one = result["one"]
    return {
        name: {key: max(abs(a - b) for a, b in zip(seen[key], one[key])) for key in ("losses", "grad_norms")}
        for name, seen in result["layouts"].items()
    }


def table(result: dict[str, Any]) -> str:
    one, spread = result["one"], result["spread"]
    lines = [
        f"hidden {result['hidden']}, 9 layers, {GLOBAL} x {SEQUENCE} tokens a step, bf16; noise of the order of "
        f"addition: loss {spread['losses']:.2e}, gradient norm {spread['grad_norms']:.2e}",
        "| layout | loss off by | gradient norm off by | ms a step | of two GPUs | sent, MB a rank, step | peak GB |",
        "|---|---|---|---|---|---|---|",
        f"| one GPU | - | - | {one['milliseconds']:.0f} | - | - | {one['peak_gb']:.1f} |",
    ]
    for name, off in deviations(result).items():
        seen = result["layouts"][name]
        share = one["milliseconds"] / (2 * seen["milliseconds"])
        lines.append(
            f"| {name} | {off['losses']:.2e} | {off['grad_norms']:.2e} | {seen['milliseconds']:.0f} | {share:.2f} "
            f"| {seen['sent_mb_per_step']:.0f} | {seen['peak_gb']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the results here")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--exchanges", action="store_true", help="EP2 through our own exchanges instead of all layouts")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        worker(json.loads(options.job))
        return
    result = measure(options.hidden, EXCHANGES if options.exchanges else LAYOUTS)
    print(table(result))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
