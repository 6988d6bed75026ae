"""Where a step's time goes: named ranges over the parts of the model, and the reading of a trace by these names.

The model's own files stay free of this: forward hooks open a range when a module of a part begins. A kernel belongs to
the innermost range around its launch; one that backward launches belongs to the part whose forward recorded the node
(the profiler gives both the same sequence number).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from k3train.engine import gradients
from k3train.model.attention_residuals import DepthAttention
from k3train.model.gated_mla import GatedMLA
from k3train.model.k3 import Embedding
from k3train.model.kda import KDA
from k3train.model.latent_moe import Experts, LatentMoE, Router
from k3train.model.mlp import GatedMLP

PREFIX = "part: "
GRADIENTS = "gradient accumulation"
REST = "other"
MATMUL_NAMES = ("gemm", "cutlass", "nvjet", "xmma", "cublas", "wgmma", "grouped_mm", "flash", "fmha", "cudnn")
"""What a name of a matrix-product or attention kernel has in it."""


@contextmanager
def part(name: str) -> Iterator[None]:
    """The kernels launched inside belong to `name`."""
    with record_function(PREFIX + name):
        yield


def parts_of(model: nn.Module) -> dict[nn.Module, str]:
    """The modules of a model that begin a part, and its name; the innermost wins."""
    names: dict[type, str] = {
        Embedding: "embedding", KDA: "KDA", GatedMLA: "MLA", Router: "router", Experts: "experts",
        LatentMoE: "latent, permute, combine", GatedMLP: "dense and shared MLP", DepthAttention: "attention residuals",
    }  # fmt: skip
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        for kind, label in names.items():
            if isinstance(module, kind):
                found[module] = label
        last = name.rpartition(".")[2]
        if last in ("input_norm", "post_attention_norm", "final_norm"):
            found[module] = "norms"
        elif last == "lm_head":
            found[module] = "head and loss"
    return found


@contextmanager
def annotated(engine: Any) -> Iterator[None]:
    """Name the parts of this engine's models, and the optimizer and balancing of its steps, while inside."""
    handles: list[Any] = []
    restore: list[Callable[[], None]] = []

    def wrap(owner: Any, name: str, label: str) -> None:
        real, own = getattr(owner, name), name in vars(owner)

        def timed(*args: Any, **options: Any) -> Any:
            with part(label):
                return real(*args, **options)

        setattr(owner, name, timed)
        restore.append(lambda: setattr(owner, name, real) if own else delattr(owner, name))

    wrap(engine.optimizer, "step", "optimizer")
    wrap(gradients, "balance", "balancing")
    for model in engine.models:
        for module, label in parts_of(model).items():
            if hasattr(module, "read"):  # the mix over depth with the norm behind it
                wrap(module, "read", label)
            open_ranges: list[Any] = []

            def enter(_module: nn.Module, _inputs: Any, label: str = label, held: list[Any] = open_ranges) -> None:
                held.append(record_function(PREFIX + label))
                held[-1].__enter__()

            def leave(_module: nn.Module, _inputs: Any, _out: Any, held: list[Any] = open_ranges) -> None:
                held.pop().__exit__(None, None, None)

            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for undo in restore:
            undo()


@dataclass
class Split:
    """Milliseconds of a traced stretch. parts: kernel time by part; matmul: of that, in matrix products."""

    wall: float = 0.0
    busy: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    matmul: dict[str, float] = field(default_factory=dict)
    kernels: dict[tuple[str, str], float] = field(default_factory=dict)
    launches: int = 0
    gaps: dict[str, float] = field(default_factory=dict)
    """Milliseconds without a kernel, by what the host did in the middle of each stretch."""

    @property
    def idle(self) -> float:
        """Share of the stretch in which no kernel ran."""
        return 1.0 - self.busy / self.wall if self.wall else 0.0

    def table(self) -> str:
        total = sum(self.parts.values()) or 1.0
        rows = [f"{'part':<28} {'ms':>8} {'share':>6} {'of it matrix products, ms':>26}"]
        for name, value in sorted(self.parts.items(), key=lambda item: -item[1]):
            rows.append(f"{name:<28} {value:8.2f} {value / total:6.1%} {self.matmul.get(name, 0.0):26.2f}")
        rows.append(f"busy {self.busy:.1f} of {self.wall:.1f} ms, idle {self.idle:.1%}, {self.launches} kernels")
        return "\n".join(rows)

    def top(self, count: int = 25) -> str:
        """The longest kernels by part and name."""
        rows = sorted(self.kernels.items(), key=lambda item: -item[1])[:count]
        return "\n".join(f"{value:8.2f} ms  {name:<26} {kernel[:110]}" for (name, kernel), value in rows)

    def waited_for(self, count: int = 12) -> str:
        """What the host did while the device had nothing to do, longest first."""
        rows = sorted(self.gaps.items(), key=lambda item: -item[1])[:count]
        return "\n".join(f"{value:8.2f} ms idle during {name[:110]}" for name, value in rows)


class _Ranges:
    """Nested ranges of one thread; answers which part a moment lies in."""

    def __init__(self, ranges: list[tuple[float, float, Any]]) -> None:
        self.ranges = sorted(ranges, key=lambda r: (r[0], -r[1]))
        self.starts = [r[0] for r in self.ranges]
        self.parent: list[int] = []
        stack: list[int] = []
        for i, (begin, _end, _) in enumerate(self.ranges):
            while stack and self.ranges[stack[-1]][1] <= begin:
                stack.pop()
            self.parent.append(stack[-1] if stack else -1)
            stack.append(i)

    def at(self, moment: float) -> Any:
        i = bisect_right(self.starts, moment) - 1
        while i >= 0 and self.ranges[i][1] < moment:
            i = self.parent[i]
        return self.ranges[i][2] if i >= 0 else None


def read_trace(path: Path) -> Split:
    """Split a chrome trace of torch.profiler by part. On a trace without kernels, CPU operators are counted instead."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    annotations, nodes = defaultdict(list), defaultdict(list)
    operators = []
    for e in events:
        kind, name, end = e.get("cat"), e["name"], e["ts"] + e["dur"]
        if kind == "user_annotation" and name.startswith(PREFIX):
            annotations[e["tid"]].append((e["ts"], end, name[len(PREFIX) :]))
        elif kind == "cpu_op":
            number = e.get("args", {}).get("Sequence number")
            if name.startswith("autograd::engine::evaluate_function"):
                nodes[e["tid"]].append((e["ts"], end, GRADIENTS if "AccumulateGrad" in name else number))
            else:
                operators.append((e["tid"], e["ts"], end, number, name))
    named = {tid: _Ranges(r) for tid, r in annotations.items()}
    backward = {tid: _Ranges(r) for tid, r in nodes.items()}
    forward: dict[int, str] = {}
    for tid, begin, _end, number, _name in operators:
        if number is not None and tid in named and (tid not in backward or backward[tid].at(begin) is None):
            label = named[tid].at(begin)
            if label is not None:
                forward[number] = label  # the last operator of a number is the one that made the node

    def belongs(tid: Any, moment: float) -> str:
        label = named[tid].at(moment) if tid in named else None
        if label is not None:
            return str(label)
        node = backward[tid].at(moment) if tid in backward else None
        return node if node == GRADIENTS else forward.get(node, REST)

    launches = {
        e["args"]["correlation"]: (e["tid"], e["ts"])
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    split = Split()
    spans: list[tuple[float, float]] = []
    if work:
        for e in work:
            place = launches.get(e["args"].get("correlation"))
            _count(split, belongs(*place) if place else REST, e["name"], e["dur"])
            spans.append((e["ts"], e["ts"] + e["dur"]))
    else:
        outer: dict[Any, float] = defaultdict(float)  # operators that no other operator encloses
        for tid, begin, end, _number, name in sorted(operators, key=lambda o: (str(o[0]), o[1], -o[2])):
            if begin >= outer[tid]:
                _count(split, belongs(tid, begin), name, end - begin)
                spans.append((begin, end))
                outer[tid] = end
    split.launches = len(spans)
    split.busy, split.wall = _union(spans)
    if work:
        _name_gaps(split, spans, [e for e in events if e.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver")])
    return split


def _name_gaps(split: Split, spans: list[tuple[float, float]], host: list[dict[str, Any]]) -> None:
    """Give each stretch between kernels to the host's operation around its middle that began last, on any thread."""
    by_thread: dict[Any, list[tuple[float, float, Any]]] = defaultdict(list)
    for e in host:
        by_thread[e["tid"]].append((e["ts"], e["ts"] + e["dur"], (e["ts"], e["name"])))
    threads = [_Ranges(ranges) for ranges in by_thread.values()]
    reach = min((begin for begin, _ in spans), default=0.0)
    for begin, end in sorted(spans):
        if begin > reach:
            around = [found for thread in threads if (found := thread.at((reach + begin) / 2)) is not None]
            name = max(around)[1] if around else "Python between operations"
            split.gaps[name] = split.gaps.get(name, 0.0) + (begin - reach) / 1e3
        reach = max(reach, end)


def _count(split: Split, label: str, name: str, microseconds: float) -> None:
    value = microseconds / 1e3
    split.parts[label] = split.parts.get(label, 0.0) + value
    if any(word in name.lower() for word in MATMUL_NAMES):
        split.matmul[label] = split.matmul.get(label, 0.0) + value
    split.kernels[label, name] = split.kernels.get((label, name), 0.0) + value


def _union(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Milliseconds covered by the spans, and from the first beginning to the last end."""
    if not spans:
        return 0.0, 0.0
    busy, reach = 0.0, spans and min(s[0] for s in spans)
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return busy / 1e3, (reach - min(s[0] for s in spans)) / 1e3


@contextmanager
def traced(path: Path, *, memory: bool = False) -> Iterator[Any]:
    """Trace what runs inside and write it as a chrome trace."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=kinds, profile_memory=memory) as profiler:
        yield profiler
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
