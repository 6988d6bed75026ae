"""Two GPUs under every kind of parallelism against one: losses in bf16, step time, bytes moved.

    python benchmarks/layouts.py                  # starts its own ranks; two GPUs, or one that both share
    python benchmarks/layouts.py --json out.json --exchanges
    python benchmarks/layouts.py --hidden 256 --sequence 64     # a rehearsal over gloo where there is no GPU

One GPU runs first, in three orders of reduction: as it is, and twice with the micro-batches of a step permuted and every
row-parallel product summed as two bf16 halves, which is the arithmetic of two tensor ranks. The largest difference
between those runs is the noise that a layout is held to (times 4; FLOOR where the three happen to agree). Then TP2, PP2
with 2 virtual stages, EP2, CP2 and DP2 run the same steps on two GPUs, and those that can be captured a second time as
CUDA graphs (`--exchanges`: EP2 through each of our own exchanges). Bytes are counted at torch.distributed's door, per rank
and step, for what this rank sends: an all-reduce counts its tensor once, and a replayed graph calls nothing there. Last,
an eager schedule runs under torch's debug mode that notes whatever makes the host wait for the device.

Where there is only one GPU, the two ranks share it, and each tells NCCL that it is a host of its own: the results are those of
two GPUs, the times are not. It ends with 1 where a layout differs by more than the noise.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SP": {"tensor": 2},
    "PP2 VPP2": {"pipeline": 2, "virtual": 2},
    "EP2": {"expert": 2},
    "CP2": {"context": 2},
    "DP2": {},
    "DP2 captured": {"cuda_graphs": "step"},
    "DP2 captured, reduced during the backward": {"overlap_grad_reduce": True, "cuda_graphs": "step"},
    "PP2 VPP2 captured": {"pipeline": 2, "virtual": 2, "cuda_graphs": "step"},
    "PP2 captured": {"pipeline": 2, "cuda_graphs": "step"},
    "TP2+SP captured": {"tensor": 2, "cuda_graphs": "step"},
    "CP2 captured": {"context": 2, "cuda_graphs": "step"},
}
"""Fields of `parallel`; `cuda_graphs` belongs to train."""
SLOTS = {"expert": 2, "expert_exchange": "slots"}
EXCHANGES: dict[str, dict[str, Any]] = {
    "EP2 sized": {"expert": 2, "expert_exchange": "sized", "overlap_experts": True},
    "EP2 slots": {**SLOTS, "overlap_experts": True},
    "EP2 slots captured": {**SLOTS, "overlap_experts": True, "cuda_graphs": "step"},
    "EP2 slots overflowing": {**SLOTS, "expert_capacity": 1.0, "cuda_graphs": "step"},
}
"""Our own exchanges of experts' rows."""

STEPS, TIMED = 4, 3  # captured: launched from Python, captured, replayed twice
SEQUENCE, GLOBAL = 2048, 4
FLOOR = {"losses": 2e-3, "grad_norms": 5e-3}
"""Differences that say nothing in bf16: of a loss, and of a gradient norm (relative)."""
HANG = 180.0  # seconds until ranks that hang show where they stand, and end


def make_config(parallel: dict[str, Any], hidden: int, sequence: int) -> Any:
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
    import torch

    parallel = dict(parallel)
    graphs = parallel.pop("cuda_graphs", "none")
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    model = ModelConfig(
        name="layouts", vocab_size=16384, hidden_size=hidden, pattern="KKKF*2 F", dense_hidden=4 * hidden,
        residual_block=3, kda=KDAConfig(heads=heads, head_dim=128),
        mla=MLAConfig(heads=heads, q_lora_rank=384, kv_lora_rank=512, nope_dim=128, shared_dim=64, v_dim=128),
        moe=MoEConfig(experts=32, top_k=4, shared_experts=2, expert_hidden=hidden // 2, latent=hidden // 2),
    )  # fmt: skip
    return Config(
        run=RunConfig(name="layouts", seed=1), model=model, parallel=ParallelConfig(**parallel),
        optim=OptimConfig(lr=1e-4),
        train=TrainConfig(
            seq_length=sequence, micro_batch=1, global_batch=GLOBAL, precision=precision, cuda_graphs=graphs
        ),
    )  # fmt: skip


def batches(config: Any, dp_rank: int, dp_size: int, step: int, order: int) -> Iterator[dict[str, Any]]:
    """Micro-batches of one step for one data-parallel rank; `order` permutes which micro-batch holds which sample."""
    import torch

    count, length = config.train.global_batch // dp_size, config.train.seq_length
    samples = list(range(config.train.global_batch))
    if order:
        generator = torch.Generator().manual_seed(order)
        samples = torch.randperm(len(samples), generator=generator).tolist()
    for m in range(count):
        index = samples[m * dp_size + dp_rank]
        generator = torch.Generator().manual_seed(10_000 * step + index)
        tokens = torch.randint(0, config.model.vocab_size, (length + 1,), generator=generator)
        cuts = sorted(torch.randint(1, length, (3,), generator=generator).unique().tolist())
        mask = torch.ones(length)
        mask[[c - 1 for c in cuts]] = 0
        cu = torch.tensor([0, *cuts, length], dtype=torch.int32)
        yield {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "cu_seqlens": cu}


class Traffic:
    """Counts bytes that this rank hands to torch.distributed. Make it before megatron binds those functions."""

    def __init__(self) -> None:
        from torch.distributed import distributed_c10d as c10d

        self.bytes = 0
        for name, place, key in (
            ("all_reduce", 0, "tensor"), ("all_gather_into_tensor", 1, "input_tensor"), ("all_gather", 1, "tensor"),
            ("reduce_scatter_tensor", 1, "input"), ("all_to_all_single", 1, "input"), ("isend", 0, "tensor"),
            ("send", 0, "tensor"),
        ):  # fmt: skip
            self._wrap(c10d, name, place, key)

    def _wrap(self, c10d: Any, name: str, place: int, key: str) -> None:
        import torch

        real = getattr(torch.distributed, name)
        own = getattr(c10d, name) is real  # the adapter of a machine without a GPU replaces some at the outer door only

        def counted(*args: Any, **options: Any) -> Any:
            value = args[place] if len(args) > place else options.get(key)
            if isinstance(value, torch.Tensor):
                self.bytes += value.numel() * value.element_size()
            return real(*args, **options)

        setattr(torch.distributed, name, counted)
        if own:  # torch compares the operation of a batched send with its own
            setattr(c10d, name, counted)


def sum_in_halves() -> Callable[[bool], None]:
    """A switch that makes every row-parallel product the sum of two bf16 products, as on two tensor ranks."""
    import torch

    from k3train.model.backend.local import Row
    from k3train.model.backend.te import TERow

    plain = {kind: kind.forward for kind in (Row, TERow)}

    def in_halves(self: Any, x: Any) -> Any:
        left, right = x.chunk(2, -1)
        a, b = self.weight.chunk(2, 1)
        return torch.nn.functional.linear(left, a) + torch.nn.functional.linear(right, b)

    def switch(on: bool) -> None:
        for kind, forward in plain.items():
            kind.forward = in_halves if on else forward  # type: ignore[method-assign]

    return switch


def waits_of(engine: Any, prepared: list[dict[str, Any]]) -> list[str]:
    """Lines that make the host wait for the device between the first forward and the reduced gradients."""
    import torch

    for model in engine.ddp:
        model.zero_grad_buffer()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            engine._run_schedule(iter(prepared), len(prepared), forward_only=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sorted({f"{w.filename}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)})


def worker(job: dict[str, Any]) -> None:
    """One rank: run the jobs' layouts in turn and write what rank 0 saw."""
    faulthandler.dump_traceback_later(HANG, exit=True)
    import torch
    import torch.distributed as dist

    from k3train import platform

    platform.install()  # without a GPU, megatron's calls for one are answered by the CPU
    platform.quieten()
    rank, cuda = int(os.environ.get("RANK", "0")), torch.cuda.is_available()
    if cuda:
        devices = torch.cuda.device_count()
        torch.cuda.set_device(rank % devices)
        if devices < int(os.environ["WORLD_SIZE"]):
            os.environ["NCCL_HOSTID"] = f"rank{rank}"  # NCCL takes no two ranks of one host on one device
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    platform.install_adam()
    traffic = Traffic()
    from k3train.parallel import layout as layouts

    halves = sum_in_halves()
    results: dict[str, Any] = {}
    for name, parallel, order in job["runs"]:
        print(f"rank {rank}: {name}", file=sys.stderr, flush=True)
        config = make_config(parallel, job["hidden"], job["sequence"])
        halves(bool(order))
        layout = layouts.initialize(layouts.sizes_from_config(config.parallel, dist.get_world_size()))
        results[name] = run_one(config, layout, traffic, order)
        if rank == 0:
            Path(job["out"]).write_text(json.dumps(results))
    dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def run_one(config: Any, layout: Any, traffic: Traffic, order: int) -> dict[str, Any]:
    """Losses and norms of the first steps, then step times, traffic and waits, on this rank."""
    import torch

    from k3train.engine.megatron import MegatronEngine

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    engine = MegatronEngine(config, layout, device)
    micro = engine.micro_batches(GLOBAL)

    def prepare(number: int) -> list[dict[str, Any]]:
        return list(batches(config, layout.dp.rank(), layout.sizes.data, number, order))

    def synchronize() -> None:
        if cuda:
            torch.cuda.synchronize()

    seen = [engine.step(iter(prepare(i)), 1e-4, micro) for i in range(STEPS)]
    times = []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    traffic.bytes = 0
    for i in range(TIMED):
        prepared = prepare(i)
        synchronize()
        start = time.perf_counter()
        engine.step(iter(prepared), 1e-4, micro)
        synchronize()
        times.append(time.perf_counter() - start)
    found = {
        "losses": [r.loss for r in seen], "grad_norms": [r.grad_norm for r in seen],
        "milliseconds": statistics.median(times) * 1e3, "sent_mb_per_step": traffic.bytes / TIMED / 1e6,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0,
        "graphs": 0 if engine.graphs is None else len(engine.graphs.graphs),
        "waits": waits_of(engine, prepare(0)) if cuda and engine.graphs is None else [],
    }  # fmt: skip
    if engine.graphs is not None:
        engine.graphs.close()
    for model in engine.ddp:
        model.grad_accs.clear()  # hooks in C++ form a ring with the engine that Python cannot see
    engine.ctx.megatron.finalize_model_grads_func = None
    vars(engine).clear()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return found


def launch(ranks: int, runs: list[tuple[str, dict[str, Any], int]], hidden: int, sequence: int) -> dict[str, Any]:
    """Start `ranks` processes of this script and return rank 0's results. Raises RuntimeError with a rank's output where
    none of the runs came to its end; of others, the output is under "failed"."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        job = json.dumps({"runs": runs, "hidden": hidden, "sequence": sequence, "out": str(out)})
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                   __file__, "--job", job]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG + 60, check=False)
        said = f"{ranks} ranks ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        results: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
        if not results:
            raise RuntimeError(said)
        return {**results, "failed": said} if done.returncode else results


def measure(
    hidden: int = 1024, sequence: int = SEQUENCE, on_two: dict[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The reference runs on one GPU, every layout (of `on_two`, else LAYOUTS) on two, and the noise to judge by."""
    reference = launch(1, [(f"order {order}", {}, order) for order in (0, 1, 2)], hidden, sequence)
    failed = reference.pop("failed", "")
    if failed:
        raise RuntimeError(failed)
    runs = list(reference.values())
    spread = {key: max(abs(a[key][i] - b[key][i]) for a in runs for b in runs for i in range(STEPS)) for key in FLOOR}
    layouts = launch(2, [(name, parallel, 0) for name, parallel in (on_two or LAYOUTS).items()], hidden, sequence)
    failed = layouts.pop("failed", "")
    limits = {
        "losses": max(4 * spread["losses"], FLOOR["losses"]),
        "grad_norms": max(4 * spread["grad_norms"], FLOOR["grad_norms"] * max(runs[0]["grad_norms"])),
    }
    return {"one": runs[0], "spread": spread, "limits": limits, "layouts": layouts, "hidden": hidden,
            "sequence": sequence, "failed": failed}  # fmt: skip


def deviations(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Largest difference of each layout from one GPU, over the steps."""
    return {name: distance(seen, result["one"]) for name, seen in result["layouts"].items()}


def distance(seen: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Largest difference of losses and of gradient norms over the steps."""
    return {key: max(abs(a - b) for a, b in zip(seen[key], other[key])) for key in FLOOR}


def table(result: dict[str, Any]) -> str:
    one, spread = result["one"], result["spread"]
    lines = [
        f"hidden {result['hidden']}, 9 layers, {GLOBAL} x {result['sequence']} tokens a step, bf16; noise of the order of "
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
    for name, seen in result["layouts"].items():
        lines += [f"{name} waits at {place}" for place in seen["waits"]]
    return "\n".join([*lines, result["failed"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the results here")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=SEQUENCE)
    parser.add_argument("--exchanges", action="store_true", help="EP2 through our own exchanges instead of all layouts")
    parser.add_argument("--only", help="some of these, by commas, in their place")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        worker(json.loads(options.job))
        return
    known = EXCHANGES if options.exchanges else LAYOUTS
    names = options.only.split(",") if options.only else list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)}: not one of {', '.join(known)}")
    result = measure(options.hidden, options.sequence, {name: known[name] for name in names})
    print(table(result))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))
    beyond = [
        f"{name}: {key} {off[key]:.2e}, limit {result['limits'][key]:.2e}"
        for name, off in deviations(result).items() for key in off if off[key] > result["limits"][key]
    ]  # fmt: skip
    if beyond or result["failed"]:
        sys.exit("\n".join(["beyond the noise, or not come to an end:", *beyond]))


if __name__ == "__main__":
    main()
