"""Two GPUs, one model, four ways to share its state: step time, memory and losses of each engine.

    python benchmarks/engines.py                              # starts 2 ranks; needs 2 CUDA devices and deepspeed
    python benchmarks/engines.py --ranks 1 --arms ZeRO-3 --json out.json

The megatron engine's data parallel (distributed optimizer: state cut like ZeRO-1) beside DeepSpeed's ZeRO-1, 2 and 3,
all in bf16 with fp32 master weights and fp32 reduction, torch's products, launched from Python, on the same batches; then
megatron's with captured micro-batches, which ZeRO cannot do. The model is k3_proxy's widths in five layers and fewer
experts. Step times are medians of whole steps (forwards, backwards, reduction, update) after warm-up; memory is the peak
that torch allocated on rank 0, and what it holds between steps.

Losses and gradient norms are compared with those of megatron's data parallel. What rounding alone does to them is
measured too: "other order" is megatron's again with the same micro-batches met in another order by other ranks.

Every arm has processes of its own, because DeepSpeed keeps hold of what it made. All arms import at once, which is most
of what a start costs, and then wait for their turn, without a CUDA context: one arm at a time has the GPUs. Rank 0 says
where it is; an arm at its limit says where every thread stands; what was measured until then is kept.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "data")]

ARMS: dict[str, list[str]] = {
    "megatron DP": ["parallel.distributed_optimizer=true"],
    "ZeRO-1": ["engine=deepspeed", "engine.zero_stage=1"],
    "ZeRO-2": ["engine=deepspeed", "engine.zero_stage=2"],
    "ZeRO-3": ["engine=deepspeed", "engine.zero_stage=3"],
    "captured": ["parallel.distributed_optimizer=true", "train.cuda_graphs=step"],
    "other order": ["parallel.distributed_optimizer=true"],
}
REFERENCE, REORDERED = "megatron DP", "other order"
BASE = [
    "model=k3_proxy", "model.pattern='KKKF K'", "model.moe.experts=32", "run.name=engines", "train.seq_length=4096",
    "train.micro_batch=2", "train.global_batch=8", "train.precision=bf16", "tracking.wandb=disabled", "optim.lr=1e-4",
    "model.backend=torch",
]  # fmt: skip
WARMUP, TIMED = 3, 5
IMPORTS = 90.0  # seconds; past them the first arm begins while others still import


def batches(config: Any, rank: int, ranks: int, step: int, *, reordered: bool = False) -> Iterator[dict[str, Any]]:
    """This rank's micro-batches of a step: packed documents of random tokens, a function of the sample's number.

    reordered: the same micro-batches of all ranks, dealt out in blocks from the last to the first: sums associate
    otherwise.
    """
    import torch

    s, b = config.train.seq_length, config.train.micro_batch
    count = config.train.global_batch // (b * ranks)
    for m in range(count):
        number = count * ranks - 1 - (rank * count + m) if reordered else m * ranks + rank
        generator = torch.Generator().manual_seed(1000 * step + number)
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


def measure(engine: Any, device: Any, say: Callable[[str], None], *, reordered: bool = False) -> dict[str, Any]:
    """Losses and norms of all steps, the median step in ms, tokens/s of all ranks, and GB of memory on this rank."""
    import torch

    config, layout = engine.config, engine.layout
    ranks = layout.sizes.data
    cuda = device.type == "cuda"
    times, losses, norms = [], [], []
    for step in range(WARMUP + TIMED):
        if cuda:
            torch.cuda.synchronize()
            if step == WARMUP:
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        source = batches(config, layout.dp.rank(), ranks, step, reordered=reordered)
        result = engine.step(source, 1e-4, engine.micro_batches(config.train.global_batch))
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if step < WARMUP:
            say(f"step {step + 1}: {times[-1]:.2f} s, loss {result.loss:.4f}")
    middle = statistics.median(times[WARMUP:])
    tokens = config.train.global_batch * config.train.seq_length
    return {
        "losses": losses, "grad_norms": norms, "step_ms": middle * 1e3,
        "step_ms_range": [1e3 * min(times[WARMUP:]), 1e3 * max(times[WARMUP:])], "tokens_per_second": tokens / middle,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0,
        "held_gb": torch.cuda.memory_allocated() / 1e9 if cuda else 0.0,
    }  # fmt: skip


def worker(job: dict[str, Any]) -> None:
    """One rank of one arm: import, wait for the turn, measure; rank 0 writes what it saw."""
    begun = time.perf_counter()
    rank, ranks, arm = job["rank"], job["ranks"], job["arm"]
    folder = Path(job["folder"])

    def say(words: str) -> None:
        if rank == 0:
            print(f"  {arm}, {time.perf_counter() - begun:5.1f} s: {words}", flush=True)

    from k3train.platform import install, install_adam, quieten

    install()
    import torch
    import torch.distributed as dist

    from k3train.config.compose import compose

    quieten()
    config = compose([*BASE, *ARMS[arm], f"parallel.world={ranks}", *job["overrides"]])
    importlib.import_module("k3train.engine.megatron")  # both engines need it
    if config.engine.name == "deepspeed":
        from k3train.engine.deepspeed import require

        require()
    (folder / f"ready-{job['number']}-{rank}").touch()
    say("imported")
    while not (folder / f"turn-{job['number']}").exists():
        time.sleep(0.05)
    begun = time.perf_counter()
    faulthandler.dump_traceback_later(max(job["limit"] - 1.0, 1.0))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store = f"file://{folder}/store-{job['number']}"
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=store, rank=rank, world_size=ranks)
    install_adam()
    dist.barrier()
    say("ranks connected")
    start = time.perf_counter()
    engine = build(config, device)
    built = time.perf_counter() - start
    say(f"built in {built:.1f} s")
    result = {**measure(engine, device, say, reordered=arm == REORDERED), "built_s": built}
    result["parameters"] = sum(_numel(p) for m in engine.models for p in m.parameters())
    result["seconds"] = time.perf_counter() - begun
    if rank == 0:
        (folder / f"out-{job['number']}.json").write_text(json.dumps(result))
        say(f"{result['step_ms']:.1f} ms a step")
    dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    os._exit(0)  # nothing is left to do, and taking down NCCL and DeepSpeed takes seconds


def _numel(parameter: Any) -> int:
    count = 1
    for size in parameter.k3.shape:
        count *= size
    return count


def launch(
    ranks: int, arms: list[str], overrides: list[str], limit: float, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Measure the arms in turn, each for at most `limit` seconds; `keep` is given everything after each."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = [
            [_start(folder, number, arm, rank, ranks, overrides, limit) for rank in range(ranks)]
            for number, arm in enumerate(arms)
        ]
        try:
            _wait(lambda: all(_ready(folder, n, r) or p.poll() is not None for n, s in enumerate(started)
                              for r, p in enumerate(s)), IMPORTS)  # fmt: skip
            for number, (arm, processes) in enumerate(zip(arms, started, strict=True)):
                (folder / f"turn-{number}").touch()
                ended = _wait(
                    lambda these=processes: any(p.poll() for p in these) or all(p.poll() == 0 for p in these), limit
                )
                _end(processes)
                out = folder / f"out-{number}.json"
                if out.is_file():
                    results[arm] = json.loads(out.read_text())
                    keep(results)
                    continue
                print(f"  {arm}: {'failed' if ended else f'nothing after {limit:g} s'}", flush=True)
                for rank in range(ranks):
                    text = (folder / f"log-{number}-{rank}").read_text(errors="replace")
                    print(f"--- rank {rank}\n{text[-4000:]}", flush=True)
        finally:
            for processes in started:
                _end(processes)


def _start(
    folder: Path, number: int, arm: str, rank: int, ranks: int, overrides: list[str], limit: float
) -> subprocess.Popen[bytes]:
    job = {"folder": str(folder), "number": number, "arm": arm, "rank": rank, "ranks": ranks, "overrides": overrides,
           "limit": limit}  # fmt: skip
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    env = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": threads, **os.environ}
    env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    with (folder / f"log-{number}-{rank}").open("wb") as log:
        return subprocess.Popen([sys.executable, __file__, "--job", json.dumps(job)], stderr=log, env=env)


def _ready(folder: Path, number: int, rank: int) -> bool:
    return (folder / f"ready-{number}-{rank}").exists()


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if done():
            return True
        time.sleep(0.05)
    return False


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """A rank whose peer failed waits for it for good."""
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def distance(seen: dict[str, Any], other: dict[str, Any], key: str) -> float:
    """Largest relative difference over the steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(seen[key], other[key], strict=True))


def show(results: dict[str, Any]) -> None:
    """The table of all arms: how far losses and norms are from the reference's, relative, in the last columns."""
    print(f"{'':12} {'ms/step':>9} {'from':>7} {'to':>7} {'tokens/s':>10} {'peak GB':>8} {'held GB':>8} {'built s':>8} "
          f"{'loss off':>9} {'norm off':>9}  losses")  # fmt: skip
    for name, r in results.items():
        losses = " ".join(f"{loss:.4f}" for loss in r["losses"][:WARMUP])
        off = [distance(r, results.get(REFERENCE, r), key) for key in ("losses", "grad_norms")]
        print(
            f"{name:12} {r['step_ms']:9.1f} {r['step_ms_range'][0]:7.1f} {r['step_ms_range'][1]:7.1f} "
            f"{r['tokens_per_second']:10,.0f} {r['peak_gb']:8.1f} {r['held_gb']:8.1f} {r['built_s']:8.1f} "
            f"{off[0]:9.1e} {off[1]:9.1e}  {losses}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that an arm may take, once it has the GPUs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args()
    if args.job:
        worker(json.loads(args.job))
    arms = args.arms.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--arms {unknown}: known are {list(ARMS)}")
    kept: dict[str, Any] = {}

    def keep(results: dict[str, Any]) -> None:
        kept.update(results)
        if args.json:
            args.json.write_text(json.dumps(kept, indent=1))

    launch(args.ranks, arms, overrides, args.limit, keep)
    if kept:
        print(f"{next(iter(kept.values()))['parameters'] / 1e9:.2f} B parameters on {args.ranks} ranks")
        show(kept)
    return 0 if len(kept) == len(arms) else 1


if __name__ == "__main__":
    sys.exit(main())
