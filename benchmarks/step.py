"""The whole training step on one GPU: tokens/s, MFU, and where the time goes.

    python benchmarks/step.py                                  # model=k3_proxy, sequence 8192, bf16
    python benchmarks/step.py --arms base,balanced,residuals_off,balancing_none --json out.json
    python benchmarks/step.py --arms base model=k3_tiny train.seq_length=512     # any override of k3train
    python benchmarks/step.py --arms base,stock,stock_whole    # megatron-core's own transformer beside ours (stock.py)
    python benchmarks/step.py --arms base,plain                # the same model in plain PyTorch (plain.py)
    torchrun --nproc-per-node=2 benchmarks/step.py --arms data2,expert2,pipeline2,context2_long --no-split
    python benchmarks/step.py --alone 1/2 --arms context2_graphs --no-split     # that rank's share of the work (alone.py)

Each arm trains a few steps of the engine that `k3train train` uses: forward and backward of all micro-batches, gradient
norm and clipping, optimizer, balancing. tokens/s is over whole steps, by the median step. MFU is model FLOPs (the
convention of k3train.planning.flops, printed) over 989.5 TFLOP/s. The split is a trace of one more step, eager, by part;
the idle share is of a traced step as it is trained. `natural` routing is what the router of a fresh model chooses
on tokens with Zipf's frequencies; `balanced` forces every expert to the same number of tokens.
Documents end inside the sequences (about 2000 tokens each), so every part works on packed documents; in arms named
`whole` a sequence is one document. `inside documents` is the MFU that counts only the attention that documents leave.
An arm that runs out of memory is tried again with half of the micro-batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "data")]

# Stages of k3_proxy whose chunks of one number take equal time on both ranks, by the split of one GPU's step: ranks run
# the same chunk at the same time, so what counts is each chunk's slower rank, not the slowest stage of all.
EVEN = "parallel.pipeline_layout='E K K K|F K K|K F K K|K F F L'"
EVEN3 = "parallel.pipeline_layout='E K K|K F|K K|K F|K K K|F F L'"
LONG = ["train.seq_length=65536", "train.micro_batch=1", "train.global_batch=2"]
EIGHT = ["train.recompute=unit", "train.recompute_layers=8"]
CONTEXT_OVERLAP = [
    "parallel.context=2", "parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true", *LONG,
]  # fmt: skip
ARMS: dict[str, list[str]] = {
    "base": [],
    "balanced": [],
    "eager": ["train.cuda_graphs=none"],
    "local": ["model.backend=local"],
    "torch": ["model.backend=torch"],
    "te": ["model.backend=te"],
    "residuals_off": ["model.attention_residuals=off"],
    "balancing_none": ["model.balancing=none"],
    "recompute_none": ["train.recompute=none"],
    "recompute_selective": ["train.recompute=selective"],
    "recompute_unit": ["train.recompute=unit"],
    "recompute_full": ["train.recompute=full"],
    "activations_fp8": ["train.activations.units=fp8", "train.activations.gates=fp8"],
    "muon": ["optim=muon"],
    "fp8_block": ["train.precision=fp8_block"],
    "fp8_current": ["train.precision=fp8_current"],
    "fp8_cached": ["train.precision=fp8_current", "train.fp8_cache_weights=true"],
    "long": [*LONG, "train.recompute=unit", "train.cuda_graphs=none"],
    "long_graphs": [*LONG, "train.recompute=unit"],
    "long_eight": [*LONG, *EIGHT, "train.cuda_graphs=none"],
    "long_graphs_eight": [*LONG, *EIGHT],
    "data2": ["parallel.data=2"],
    "data2_overlap": ["parallel.data=2", "parallel.overlap_grad_reduce=true"],  # the whole schedule in one graph
    "expert2": ["parallel.expert=2", "train.cuda_graphs=none"],
    "expert2_sized": ["parallel.expert=2", "parallel.expert_exchange=sized", "parallel.overlap_experts=true",
                      "train.cuda_graphs=none"],
    "expert2_slots": ["parallel.expert=2", "parallel.expert_exchange=slots", "parallel.overlap_experts=true"],
    "expert2_reduced": ["parallel.expert=2", "parallel.expert_exchange=slots", "parallel.overlap_experts=true",
                        "parallel.expert_capacity=1.15", "parallel.overlap_grad_reduce=true"],  # all in one graph
    "expert2_alone": ["parallel.expert=2", "parallel.expert_exchange=slots"],  # nothing beside the exchange
    "pipeline2": ["parallel.pipeline=2", "parallel.virtual=2", "train.cuda_graphs=none"],
    "pipeline2_even": ["parallel.pipeline=2", "parallel.virtual=2", EVEN, "train.cuda_graphs=none"],
    "pipeline2_graphs": ["parallel.pipeline=2", "parallel.virtual=2", EVEN],
    "pipeline2_graphs3": ["parallel.pipeline=2", "parallel.virtual=3", EVEN3],
    "context2_long": ["parallel.context=2", *LONG, "train.recompute=unit", "train.cuda_graphs=none"],
    "context2_overlap": [*CONTEXT_OVERLAP, "train.recompute=unit", "train.cuda_graphs=none"],
    "context2_long_none": [*CONTEXT_OVERLAP, "train.recompute=none", "train.cuda_graphs=none"],  # two GPUs have the room
    "context2_graphs": ["parallel.context=2", *LONG, "train.recompute=unit"],
    "context2_graphs_none": ["parallel.context=2", *LONG, "train.recompute=none"],
    "context2_graphs_overlap": [  # the whole schedule in one graph
        "parallel.context=2", "parallel.overlap_grad_reduce=true", *LONG, "train.recompute=unit",
    ],
    "context2_256k": [
        "parallel.context=2", "train.seq_length=262144", "train.micro_batch=1", "train.global_batch=1",
        "train.recompute=full", "train.cuda_graphs=none",
    ],
    "long_whole": [*LONG, "train.recompute=unit", "train.cuda_graphs=none"],
    "stock": ["train.cuda_graphs=none"],
    "stock_whole": ["train.cuda_graphs=none"],
    "stock_long": [*LONG, "train.cuda_graphs=none"],
    "stock_long_whole": [*LONG, "train.cuda_graphs=none"],
    "stock_long_eight": [*LONG, "train.cuda_graphs=none"],  # megatron's way to recompute the first eight layers only
    "plain": ["model.backend=torch", "train.cuda_graphs=none", "train.micro_batch=2"],
}  # fmt: skip
"""What each arm overrides. The base is model=k3_proxy with AdamW."""

BASE = [
    "model=k3_proxy", "run.name=step", "train.seq_length=8192", "train.micro_batch=4", "train.global_batch=16",
    "train.cuda_graphs=step",
    "train.precision=bf16", "tracking.wandb=disabled", "optim.lr=1e-4",
]  # fmt: skip


def batches(
    config: Any, step: int, micro_batches: int, rank: int = 0, ranks: int = 1, *, whole: bool = False
) -> Iterator[dict[str, Any]]:
    """Micro-batches of packed documents with Zipf-distributed tokens, of one of the data-parallel ranks.

    whole: a sequence is one document.
    """
    import torch

    s, b, vocabulary = config.train.seq_length, config.train.micro_batch, config.model.vocab_size
    for m in range(micro_batches):
        generator = torch.Generator().manual_seed(1_000_003 * step + m * ranks + rank)
        uniform = torch.rand(b * s + 1, generator=generator)
        tokens = torch.exp(uniform * torch.log(torch.tensor(float(vocabulary)))).long().clamp_(1, vocabulary) - 1
        count = max(1, s // 2000)
        cuts = torch.randint(1, s, (b, count), generator=generator) + torch.arange(b)[:, None] * s
        edges = torch.cat([cuts.flatten()[: 0 if whole else None], torch.arange(1, b + 1) * s]).unique()
        mask = torch.ones(b * s)
        mask[edges - 1] = 0
        cu = torch.cat([torch.zeros(1, dtype=torch.int64), edges]).to(torch.int32)
        yield {
            "tokens": tokens[:-1].contiguous(),
            "labels": tokens[1:].contiguous(),
            "loss_mask": mask,
            "cu_seqlens": cu,
        }


def force_balanced(engine: Any, tokens: int) -> None:
    """Send token t to experts t*k ... t*k + k - 1 modulo E in every layer, so that all get the same number."""
    import torch

    from k3train.engine.gradients import routers

    moe = engine.config.model.moe
    slots = torch.arange(tokens * moe.top_k, device=engine.device) % moe.experts
    for router in routers(engine.models):
        router.forced = slots.view(tokens, moe.top_k)


def make_engine(config: Any, arm: str = "base") -> Any:
    import torch

    from k3train import launch, platform
    from k3train.engine.megatron import MegatronEngine
    from k3train.parallel import layout as layouts

    place = launch.init_distributed(config)
    platform.install_adam()
    layout = layouts.initialize(layouts.sizes_from_config(config.parallel, place.world))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if arm.startswith("stock"):
        import stock

        recompute = "none" if "long" not in arm else "eight" if "eight" in arm else "full"
        made = stock.StockEngine(config, layout, device, packed="whole" not in arm, recompute=recompute)
        print(stock.describe(config.model, made.shape, config.train.seq_length), flush=True)
        return made
    return MegatronEngine(config, layout, device)


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def syncs(run: Any) -> Counter[str]:
    """Operations inside `run` that make the host wait for the GPU, by the line that caused them."""
    import torch

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"{Path(w.filename).parent.name}/{Path(w.filename).name}:{w.lineno}"
        for w in seen
        if "synchroniz" in str(w.message)
    )


def measure(name: str, overrides: list[str], *, steps: int, split: bool, audit: bool, keep: Path | None) -> Any:
    """One arm: build, warm up, time, trace. Returns what to print."""

    import torch

    from k3train.config.compose import compose

    config = compose([*BASE, *overrides, *ARMS[name]])
    if name == "plain":
        import plain

        print(f"plain: KDA is {plain.install()}", flush=True)
    while True:
        begin = time.perf_counter()
        engine = None
        try:
            engine = make_engine(config, name)
            built = time.perf_counter() - begin
            return run_arm(name, overrides, config, engine, built, steps=steps, split=split, audit=audit, keep=keep)
        except Exception as error:
            # a capture that fails for memory says so as its cause
            memory = any(isinstance(e, torch.OutOfMemoryError) for e in (error, error.__cause__))
            if not memory or config.train.micro_batch == 1:
                raise
            print(f"{name}: out of memory at micro-batch {config.train.micro_batch}: {str(error)[:90]}", flush=True)
        finally:
            release(engine)
            engine = None
        config.train.micro_batch //= 2


def run_arm(
    name: str, overrides: list[str], config: Any, engine: Any, built: float, *, steps: int, split: bool, audit: bool,
    keep: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Warm up, time and trace a built engine."""
    import torch

    from k3train.planning import flops, memory
    from k3train.train import profiling

    cuda = torch.cuda.is_available()
    micro = engine.micro_batches(config.train.global_batch)
    tokens = config.train.global_batch * config.train.seq_length
    if name == "balanced":
        force_balanced(engine, config.train.seq_length * config.train.micro_batch)
    number = iter(range(1 << 30))
    sizes, place = engine.layout.sizes, engine.layout.dp.rank()

    def prepare() -> Iterator[dict[str, Any]]:
        return iter(list(batches(config, next(number), micro, place, sizes.data, whole="whole" in name)))

    def step() -> Any:
        return engine.step(prepare(), config.optim.lr, micro)

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    results = [step(), step()]
    synchronize()
    warm = time.perf_counter() - begin
    times = []
    for _ in range(steps):
        prepared = prepare()
        synchronize()
        begin = time.perf_counter()
        results.append(engine.step(prepared, config.optim.lr, micro))
        synchronize()
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    if hasattr(engine, "shape"):  # megatron-core's transformer counts its own
        forward = engine.shape.flops(config.train.seq_length)
        counted, attention = 3 * sum(forward.values()), 3 * forward["attention"]
    else:
        counted = flops.flops_per_token(config.model, config.train.seq_length)
        attention = 3 * flops.forward(config.model, config.train.seq_length).full_attention
    inside = counted - attention * (1 - square_share(prepare(), config.train.seq_length))
    rate = tokens / seconds
    peak = flops.PEAK_TFLOPS * sizes.world
    found: dict[str, Any] = {
        "arm": name, "overrides": overrides + ARMS[name], "tokens_per_second": rate, "step_seconds": seconds,
        "spread": (max(times) - min(times)) / seconds, "tflops": counted * rate / 1e12, "flops_per_token": counted,
        "mfu": counted * rate / 1e12 / peak, "mfu_inside": inside * rate / 1e12 / peak,
        "micro_batch": config.train.micro_batch, "gpus": sizes.world, "tokens_per_step": tokens, "micro_batches": micro,
        "losses": [r.loss for r in results], "built": built, "warm": warm,
        "planned_gb": None if hasattr(engine, "shape") else memory.estimate(config, sizes.world).total / 1e9,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if cuda else None,
    }  # fmt: skip
    load = results[-1].load
    if load is not None:
        found["max_vio"] = float((load.double().max(-1).values / load.double().mean(-1) - 1).mean())
    exchange = getattr(engine.ctx, "exchange", None)
    if exchange is not None and exchange.fullest is not None:
        found["fullest"] = int(exchange.fullest) / exchange.share
        found["done_again"] = sum("moe/capacity_wanted" in r.extra for r in results)
    folder = keep or Path(tempfile.mkdtemp())
    if split:
        path = folder / f"step_{name}.json"
        with profiling.traced(path):
            step()
        whole = profiling.read_trace(path)
        found["idle"], found["gaps"] = whole.idle, whole.waited_for()
        found["busy_ms"], found["wall_ms"], found["kernels"] = whole.busy, whole.wall, whole.launches
        path.unlink()
    if split and not hasattr(engine, "shape"):  # parts are those of our model
        with engine.eager(), profiling.annotated(engine), profiling.traced(path):
            step()
        parts = profiling.read_trace(path)
        found["split_ms"], found["matmul_ms"], found["micro_in_split"] = parts.parts, parts.matmul, micro
        found["split_table"], found["top"] = parts.table(), parts.top()
        path.unlink()
    if audit and cuda:
        found["syncs"] = dict(syncs(step))
    if audit and cuda and not hasattr(engine, "shape"):
        with engine.eager():
            found["syncs_eager"] = dict(syncs(step))
    return found


def square_share(micro_batches: Iterator[dict[str, Any]], length: int) -> float:
    """Attention inside documents over attention over whole sequences: the sum of squares of lengths, as a share."""
    borders = [batch["cu_seqlens"].double().diff() for batch in micro_batches]
    return sum(float(x.square().sum()) for x in borders) / sum(float(x.sum()) * length for x in borders)


def release(engine: Any) -> None:
    """Give an engine's memory back. Its gradient hooks live in C++ nodes, where Python cannot see that they form a ring
    with everything else; megatron's dispatchers keep a micro-batch's probabilities, and with them its whole graph."""
    import torch

    if engine is not None:
        if getattr(engine, "graphs", None) is not None:
            engine.graphs.close()  # communicators of another layout wait for graphs that hold their operations
        for model in engine.ddp:
            model.grad_accs.clear()
            for module in model.modules():
                for holder in (module, *vars(module).values()):
                    kept = getattr(holder, "__dict__", {})
                    for name in [n for n, x in kept.items() if isinstance(x, torch.Tensor) and x.grad_fn is not None]:
                        kept[name] = None
        engine.ctx.megatron.finalize_model_grads_func = None
        vars(engine).clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def show(found: dict[str, Any]) -> str:
    lines = [
        f"== {found['arm']} {' '.join(found['overrides'])}",
        f"{found['tokens_per_second']:,.0f} tokens/s, {found['tflops']:.1f} TFLOP/s, MFU {found['mfu']:.1%} "
        f"({found['flops_per_token']:.4g} FLOP a token x tokens/s over {found['gpus']} x 989.5e12), inside documents "
        f"{found['mfu_inside']:.1%}; step {found['step_seconds']:.3f} s of "
        f"{found['tokens_per_step']} tokens in {found['micro_batches']} micro-batches, spread {found['spread']:.1%}",
        f"losses {' '.join(f'{x:.3f}' for x in found['losses'])}; MaxVio {found.get('max_vio', float('nan')):.2f}; "
        f"built in {found['built']:.1f} s, first two steps {found['warm']:.1f} s",
    ]
    if found["peak_gb"] is not None:
        lines.append(
            f"peak memory {found['peak_gb']:.1f} GB allocated, {found['reserved_gb']:.1f} reserved; "
            + ("not planned" if found["planned_gb"] is None else f"planned {found['planned_gb']:.1f}")
        )
    if "fullest" in found:
        lines.append(
            f"slots: the fullest of this rank's took {found['fullest']:.3f} equal shares in the last step; "
            f"{found['done_again']} steps were done again"
        )
    if "idle" in found:
        lines += [
            f"GPU idle inside a step: {found['idle']:.1%} ({found['kernels']} kernels, traced)",
            *(found[key] for key in ("gaps", "split_table", "top") if found.get(key)),
        ]  # fmt: skip
    for key in ("syncs", "syncs_eager"):
        if key in found:
            lines.append(f"{key}: {sum(found[key].values())} {found[key]}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default="base,balanced", help=f"some of {', '.join(ARMS)}")
    parser.add_argument("--steps", type=int, default=3, help="timed steps an arm")
    parser.add_argument("--no-split", action="store_true", help="do not trace")
    parser.add_argument("--split-all", action="store_true", help="trace every arm, not only the first")
    parser.add_argument("--audit", action="store_true", help="count what makes the host wait")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--keep", type=Path, help="folder for traces while they are read")
    parser.add_argument(
        "--alone", metavar="RANK/WORLD", help="one rank by itself, whose exchanges are copies of its own"
    )
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    unknown = set(options.arms.split(",")) - set(ARMS)
    if unknown:
        parser.error(f"--arms: {', '.join(sorted(unknown))}: not one of {', '.join(ARMS)}")
    if options.alone:
        import alone

        alone.install(options.alone)
    from k3train import platform
    from k3train.config.compose import compose
    from k3train.planning import flops

    platform.install()
    config = compose([*BASE, *options.overrides])
    for arm in options.arms.split(",") if options.alone else ():
        stages = compose([*BASE, *options.overrides, *ARMS[arm]]).parallel.pipeline
        if stages > 1:
            parser.error(
                f"--alone {options.alone}: {arm} has parallel.pipeline={stages}, whose stages wait for one another's tensors; "
                f"leave it out, or type torchrun --nproc-per-node={stages} benchmarks/step.py --arms {arm}"
            )
    silent = not options.alone and int(os.environ.get("RANK", "0")) > 0
    if not silent:
        print(flops.formula(config.model, config.train.seq_length), flush=True)
    results = []
    for i, arm in enumerate(options.arms.split(",")):
        try:
            found = measure(
                arm, options.overrides, steps=options.steps, audit=options.audit and i == 0, keep=options.keep,
                split=not options.no_split and (i == 0 or options.split_all),
            )  # fmt: skip
        except Exception as error:  # the other arms are still worth their time
            print(f"== {arm}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            traceback.print_exception(error, limit=-12)
            found = None
        release(None)  # what the error held
        if found is None:
            continue
        results.append(found)
        if silent:
            continue
        print(show(found), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1, default=str))


if __name__ == "__main__":
    main()
