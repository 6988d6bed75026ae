"""Two GPUs, one model, four ways to share its state: step time and memory of each engine.

    python benchmarks/engines.py                              # starts 2 ranks; needs 2 CUDA devices and deepspeed
    python benchmarks/engines.py --ranks 1 --json out.json

The megatron engine's data parallel (distributed optimizer: state cut like ZeRO-1) beside DeepSpeed's ZeRO-1, 2 and 3,
all in bf16 with fp32 master weights and fp32 reduction, on the same batches. The model is k3_proxy's widths in five
layers and fewer experts. Step times are medians of whole steps (forwards, backwards, reduction, update) after warm-up;
memory is the peak that torch allocated on rank 0, and what it holds between steps. Losses are printed to compare.
"""

from __future__ import annotations

import argparse
import gc
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

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "data")]

ARMS: dict[str, list[str]] = {
    "megatron DP": ["parallel.distributed_optimizer=true"],
    "ZeRO-1": ["engine=deepspeed", "engine.zero_stage=1"],
    "ZeRO-2": ["engine=deepspeed", "engine.zero_stage=2"],
    "ZeRO-3": ["engine=deepspeed", "engine.zero_stage=3"],
}
BASE = [
    "model=k3_proxy", "model.pattern='KKKF K'", "model.moe.experts=32", "run.name=engines", "train.seq_length=4096",
    "train.micro_batch=2", "train.global_batch=8", "train.precision=bf16", "tracking.wandb=disabled", "optim.lr=1e-4",
]  # fmt: skip
WARMUP, TIMED = 3, 5


def batches(config: Any, rank: int, ranks: int, step: int) -> Iterator[dict[str, Any]]:
    """This rank's micro-batches of a step: packed documents of random tokens, a function of the sample's number."""
    import torch

    s, b = config.train.seq_length, config.train.micro_batch
    for m in range(config.train.global_batch // (b * ranks)):
        generator = torch.Generator().manual_seed(1000 * step + m * ranks + rank)
        tokens = torch.randint(0, config.model.vocab_size, (b * s + 1,), generator=generator)
        starts = torch.arange(0, b * s + 1, s // 2)
        mask = torch.ones(b * s)
        mask[starts[1:] - 1] = 0
        cu = starts.to(torch.int32)
        yield {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "cu_seqlens": cu}


def build(config: Any, device: Any) -> Any:
    """The engine that `k3train train` would build."""
    import torch.distributed as dist

    from k3train.parallel import layout as layouts

    layout = layouts.initialize(layouts.sizes_from_config(config.parallel, dist.get_world_size()))
    if config.engine.name == "deepspeed":
        from k3train.engine.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(config, layout, device)
    from k3train.engine.megatron import MegatronEngine

    return MegatronEngine(config, layout, device)


def measure(engine: Any, device: Any) -> dict[str, Any]:
    """Losses of the warm-up, the median step in ms, tokens/s of all ranks, and GB of memory on this rank."""
    import torch

    config, layout = engine.config, engine.layout
    ranks = layout.sizes.data
    cuda = device.type == "cuda"
    times, losses = [], []
    for step in range(WARMUP + TIMED):
        if cuda:
            torch.cuda.synchronize()
            if step == WARMUP:
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        source = batches(config, layout.dp.rank(), ranks, step)
        result = engine.step(source, 1e-4, engine.micro_batches(config.train.global_batch))
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        losses.append(result.loss)
    middle = statistics.median(times[WARMUP:])
    tokens = config.train.global_batch * config.train.seq_length
    return {
        "losses": losses[:WARMUP], "step_ms": middle * 1e3, "tokens_per_second": tokens / middle,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0,
        "held_gb": torch.cuda.memory_allocated() / 1e9 if cuda else 0.0,
    }  # fmt: skip


def worker(job: dict[str, Any]) -> None:
    """One rank: run the arms in turn; rank 0 writes what it saw after each."""
    from k3train.platform import install, install_adam, quieten

    install()
    import torch
    import torch.distributed as dist

    from k3train.config.compose import compose

    quieten()
    rank = int(os.environ["RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    install_adam()
    results: dict[str, Any] = {}
    for name in job["arms"]:
        config = compose([*BASE, *ARMS[name], f"parallel.world={dist.get_world_size()}", *job["overrides"]])
        begun = time.perf_counter()
        engine = build(config, device)
        built = time.perf_counter() - begun
        results[name] = {**measure(engine, device), "built_s": built}
        results["parameters"] = sum(_numel(p) for m in engine.models for p in m.parameters())
        del engine
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        if rank == 0:
            Path(job["out"]).write_text(json.dumps(results))
            print(f"{name}: {results[name]}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _numel(parameter: Any) -> int:
    count = 1
    for size in parameter.k3.shape:
        count *= size
    return count


def launch(ranks: int, arms: list[str], overrides: list[str], timeout: float) -> dict[str, Any]:
    """Start `ranks` processes of this script; what rank 0 wrote, also where a later arm failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        job = json.dumps({"arms": arms, "overrides": overrides, "out": str(out)})
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                   __file__, "--job", job]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
            if done.returncode:
                start = max(done.stderr.find("Traceback"), 0)
                print(f"{arms}:\n{done.stderr[start : start + 6000]}", file=sys.stderr)
        except subprocess.TimeoutExpired as error:
            print(f"stopped after {error.timeout} s", file=sys.stderr)
        return json.loads(out.read_text()) if out.is_file() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args()
    if args.job:
        worker(json.loads(args.job))
        return
    results: dict[str, Any] = {}
    for arm in args.arms.split(","):  # processes of its own: DeepSpeed keeps hold of what it made
        results |= launch(args.ranks, [arm], overrides, args.timeout)
    print(f"{results.pop('parameters', 0) / 1e9:.2f} B parameters on {args.ranks} ranks")
    print(f"{'':12} {'ms/step':>9} {'tokens/s':>10} {'peak GB':>8} {'held GB':>8} {'built s':>8}  losses")
    for name, r in results.items():
        losses = " ".join(f"{loss:.4f}" for loss in r["losses"])
        print(
            f"{name:12} {r['step_ms']:9.1f} {r['tokens_per_second']:10,.0f} {r['peak_gb']:8.1f} {r['held_gb']:8.1f} "
            f"{r['built_s']:8.1f}  {losses}"
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
