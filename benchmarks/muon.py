# ruff: noqa: E402
"""What an optimizer step costs on one GPU at a model's own parameter shapes: Muon for its matrices, AdamW for the rest.

    python benchmarks/muon.py [model=k3_proxy] [tokens_per_second=...] [steps=5] [ways=true] [sweep=true]

Every parameter has an fp32 master, gradient and momentum, as in training. Prints milliseconds by kind of matrix, the
rate of Newton-Schulz, the peak memory, and with the tokens a second of training the share of a step of BATCH_TOKENS.
ways=true: first the iteration as it is, with torch's products, and the passes before and after it alone, in turn, round
by round on the same parameters, and the share that each would be. sweep=true: by how much is iterated on at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from k3train import platform

platform.install()

import torch.distributed as dist

from k3train.config.compose import compose
from k3train.config.schema import MuonConfig
from k3train.model.build import build_meta
from k3train.parallel import layout as layouts
from k3train.train import optimizer as optimizers
from k3train.train.optimizer import PerHeadMuon, blocks, is_muon

BATCH_TOKENS = 128 * 4096  # of experiment=k3_proxy


def main() -> None:
    options = {
        "model": "k3_proxy",
        "tokens_per_second": "0",
        "steps": "5",
        "sweep": "false",
        "ways": "false",
        **dict(w.split("=") for w in sys.argv[1:]),
    }
    gpu = torch.cuda.is_available()
    device = torch.device("cuda:0" if gpu else "cpu")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    layout = layouts.initialize(layouts.Sizes())
    model = compose([f"model={options['model']}", "train=smoke"]).model
    named = list(build_meta(model, layout).named_parameters())
    table: list[dict[str, Any]] = []
    speed = float(options["tokens_per_second"])
    if options["ways"] == "true":
        every = kinds(named, MuonConfig())["all matrices"]
        table += ways(every, layout, device, int(options["steps"]), speed)
        _report(options["model"], speed, table)  # what follows may be cut off
    settings = {"per head, scale=block (the recipe)": MuonConfig(), "whole matrices": MuonConfig(per_head=False)}
    for label, muon in settings.items():
        for kind, chosen in kinds(named, muon).items():
            if label != next(iter(settings)) and kind != "all matrices":
                continue
            table.append(
                {"setting": label, "kind": kind, **measure(chosen, muon, layout, device, int(options["steps"]))}
            )
            print(_row(table[-1]), flush=True)
    if options["sweep"] == "true":
        sweep(kinds(named, MuonConfig())["all matrices"], layout, device)
    rest = [(n, p) for n, p in named if not is_muon(n, p.k3, MuonConfig())]
    table.append({"setting": "AdamW, fused", "kind": "the rest", **adamw(rest, device, int(options["steps"]))})
    print(_row(table[-1]), flush=True)
    muon_ms = next(r["ms"] for r in table if r["kind"] == "all matrices" and "tflop" in r)
    if speed:
        seconds = BATCH_TOKENS / speed
        share = muon_ms / 10 / seconds
        print(
            f"a step of {BATCH_TOKENS:,} tokens at {speed:,.0f} tokens/s takes {seconds:.2f} s: Muon is {share:.1f} %"
        )
    else:
        limit = BATCH_TOKENS / (muon_ms / 30)
        print(f"at most 3 % of a step of {BATCH_TOKENS:,} tokens where training runs below {limit:,.0f} tokens/s")
    _report(options["model"], speed, table)


def _report(model: str, speed: float, table: list[dict[str, Any]]) -> None:
    if "OUT" in os.environ:
        folder = Path(os.environ["OUT"]) / "muon"
        folder.mkdir(parents=True, exist_ok=True)
        report = {"model": model, "tokens_per_second": speed, "rows": table}
        (folder / "muon.json").write_text(json.dumps(report, indent=1))


def kinds(named: list[tuple[str, Any]], muon: MuonConfig) -> dict[str, list[tuple[str, Any]]]:
    """Muon's parameters, all and by what a block of them is."""
    mine = [(n, p) for n, p in named if is_muon(n, p.k3, muon)]
    return {
        "routed experts": [(n, p) for n, p in mine if p.k3.expert],
        "split by heads": [(n, p) for n, p in mine if p.k3.head_rows],
        "whole": [(n, p) for n, p in mine if not p.k3.expert and not p.k3.head_rows],
        "all matrices": mine,
    }


def products(shapes: list[torch.Size], steps: int) -> float:
    """FLOPs of Newton-Schulz without use of symmetry: 4 A^2 B + 2 A^3 a step of an A x B block, A the shorter."""
    total = 0.0
    for n, *sides in shapes:
        a, b = sorted(sides)
        total += n * steps * (4.0 * a * a * b + 2.0 * a**3)
    return total


def filled(named: list[tuple[str, Any]], device: torch.device) -> list[torch.nn.Parameter]:
    params = []
    for _, p in named:
        held = torch.nn.Parameter(torch.randn(p.k3.shape, device=device) * 0.02)
        held.k3 = p.k3  # type: ignore[attr-defined]
        held.grad = torch.randn(p.k3.shape, device=device) * 1e-3
        params.append(held)
    return params


def measure(
    named: list[tuple[str, Any]], muon: MuonConfig, layout: layouts.Layout, device: torch.device, steps: int
) -> dict[str, Any]:
    params = filled(named, device)
    optimizer = PerHeadMuon(params, lr=1e-3, weight_decay=0.1, muon=muon, layout=layout)
    optimizer.step()
    for p in params:
        p.grad.copy_(torch.randn_like(p.grad))
    before = _memory(device)
    ms = _clock(optimizer.step, device, steps)
    shapes = [b.shape for p in params for b in blocks(p.detach(), p.k3, muon.per_head)]  # type: ignore[attr-defined]
    flops = products(shapes, muon.ns_steps)
    return {
        "millions": sum(p.numel() for p in params) / 1e6, "ms": ms, "tflop": flops / 1e12, "tflops": flops / ms / 1e9,
        "extra_gb": (_memory(device) - before) / 1e9,
    }  # fmt: skip


WAYS: dict[str, dict[str, Any]] = {
    "folded, by Triton (as it is)": {},
    "torch's products, in full": {"folded_": optimizers.by_torch_},
    "passes without iteration": {"orthogonalise_": lambda stack, steps: stack},
}


@contextlib.contextmanager
def set_to(values: dict[str, Any]) -> Iterator[None]:
    """Names of the optimizer's module as given, and then as they were."""
    before = {name: getattr(optimizers, name) for name in values}
    for name, value in values.items():
        setattr(optimizers, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(optimizers, name, value)


def ways(
    named: list[tuple[str, Any]], layout: layouts.Layout, device: torch.device, rounds: int, speed: float
) -> list[dict[str, Any]]:
    """Median milliseconds of all matrices for every way of iterating, taken in turn: what slows the machine slows all.
    A way that fails says why and is left out."""
    params = filled(named, device)
    optimizer = PerHeadMuon(params, lr=1e-3, weight_decay=0.1, muon=MuonConfig(), layout=layout)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):  # the first compiles
        for way in list(times):
            with set_to(WAYS[way]):
                try:
                    ms = _clock(optimizer.step, device, 1)
                except Exception as error:  # noqa: BLE001 - the other ways are still to be timed
                    print(f"{way}: {type(error).__name__}: {error}", flush=True)
                    del times[way]
                    continue
            if number:
                times[way].append(ms)
    rows = [
        {
            "setting": way,
            "kind": "all matrices",
            "ms": statistics.median(found),
            "lowest": min(found),
            "most": max(found),
        }
        for way, found in times.items()
    ]
    for row in rows:
        share = f"{row['ms'] / 10 / (BATCH_TOKENS / speed):5.2f} % of a step" if speed else ""
        print(
            f"{row['setting']:<36} {row['ms']:8.2f} ms ({row['lowest']:.2f} to {row['most']:.2f}) {share}", flush=True
        )
    return rows


def sweep(named: list[tuple[str, Any]], layout: layouts.Layout, device: torch.device) -> None:
    """Milliseconds of all matrices by how many elements are iterated on at once."""
    optimizer = PerHeadMuon(filled(named, device), lr=1e-3, weight_decay=0.1, muon=MuonConfig(), layout=layout)
    for piece in (1 << 22, 1 << 23, 1 << 24, 1 << 25, 1 << 28):
        with set_to({"PIECE": piece}):
            optimizer.step()
            print(f"{piece:>10} elements at once: {_clock(optimizer.step, device, 3):.1f} ms", flush=True)


def adamw(named: list[tuple[str, Any]], device: torch.device, steps: int) -> dict[str, Any]:
    params = filled(named, device)
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=device.type == "cuda")
    optimizer.step()
    return {"millions": sum(p.numel() for p in params) / 1e6, "ms": _clock(optimizer.step, device, steps)}


def _clock(step: Any, device: torch.device, steps: int) -> float:
    """Median milliseconds."""
    times = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[len(times) // 2]


def _memory(device: torch.device) -> float:
    return float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else 0.0


def _row(row: dict[str, Any]) -> str:
    rate = ""
    if "tflop" in row:
        rate = f"{row['tflop']:8.2f} TFLOP at {row['tflops']:6.1f} TFLOP/s, {row['extra_gb']:5.2f} GB more"
    return f"{row['setting']:<36} {row['kind']:<16} {row['millions']:9.1f} M  {row['ms']:8.2f} ms  {rate}"


if __name__ == "__main__":
    main()
