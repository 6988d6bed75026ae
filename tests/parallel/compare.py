"""Two runs of the tiny model, step by step: selections, losses, norms, gradients, biases, and the updated parameters."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch

from tests.parallel.assemble import Seen, assemble
from tests.parallel.pool import pool
from tests.parallel.tiny import SEED

RELATIVE = 1e-5  # of each parameter's gradient, and of the parameter, in L2
FLOOR = 1e-7  # of the global gradient norm: a gradient that is zero up to rounding has no relative error of its own


def train(
    world: int, sizes: dict[str, Any], overrides: dict[str, Any] | None = None, steps: int = 3, seed: int = SEED,
    sabotage: str | None = None,
) -> list[Seen]:  # fmt: skip
    """Train the tiny model under a layout of `world` ranks."""
    case = "tests.parallel.cases:train"
    ranks = pool(world).run(case, sizes=sizes, overrides=overrides, steps=steps, seed=seed, sabotage=sabotage)
    return assemble(ranks)


@cache
def _one_process(overrides: tuple[tuple[str, Any], ...], steps: int, seed: int) -> list[Seen]:
    return train(1, {}, dict(overrides), steps, seed)


def one_process(overrides: dict[str, Any] | None = None, steps: int = 3, seed: int = SEED) -> list[Seen]:
    """The same steps in one process, computed once a session."""
    return _one_process(tuple(sorted((overrides or {}).items())), steps, seed)


def distance(got: torch.Tensor, want: torch.Tensor, norm: float) -> float:
    """L2 distance relative to `want`, or to the floor where that is larger."""
    scale = max(float(want.double().norm()), FLOOR / RELATIVE * norm)
    return float((got.double() - want.double()).norm()) / scale


def norm_of(step: Seen) -> float:
    """The norm of all gradients, every parameter counted once."""
    return math.sqrt(sum(float(g.double().square().sum()) for g in step.gradients.values()))


def differences(got: list[Seen], want: list[Seen]) -> list[str]:
    """What differs, in the order in which one thing causes the next; empty when the runs agree."""
    found: list[str] = []
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        for layer, experts in b.selections.items():
            if not torch.equal(a.selections[layer], experts):
                flips = int((a.selections[layer] != experts).any(-1).sum())
                return [*found, f"step {step}: {flips} tokens of layer {layer} chose other experts (gap {b.gap:.1e})"]
        if a.tokens != b.tokens or (b.load is not None and not torch.equal(a.load, b.load)):
            found.append(f"step {step}: tokens {a.tokens} against {b.tokens}, or another load")
        if abs(a.loss - b.loss) > RELATIVE * abs(b.loss):
            found.append(f"step {step}: loss {a.loss!r} against {b.loss!r}")
        if abs(a.grad_norm - b.grad_norm) > RELATIVE * b.grad_norm:
            found.append(f"step {step}: gradient norm {a.grad_norm!r} against {b.grad_norm!r}")
        if abs(a.grad_norm - norm_of(a)) > RELATIVE * a.grad_norm:
            found.append(f"step {step}: gradient norm {a.grad_norm!r}, but the gradients have {norm_of(a)!r}")
        if a.extra.keys() != b.extra.keys() or any(abs(a.extra[k] - v) > RELATIVE * abs(v) for k, v in b.extra.items()):
            found.append(f"step {step}: metrics {a.extra} against {b.extra}")
        if a.gradients.keys() != b.gradients.keys():
            found.append(f"step {step}: parameters {sorted(a.gradients.keys() ^ b.gradients.keys())}")
        errors = {n: distance(g, b.gradients[n], b.grad_norm) for n, g in a.gradients.items() if n in b.gradients}
        wrong = sorted((e, n) for n, e in errors.items() if e > RELATIVE)[::-1]
        if wrong:
            shown = ", ".join(f"{n} {e:.1e}" for e, n in wrong[:12])
            found.append(f"step {step}: {len(wrong)} of {len(errors)} gradients differ: {shown}")
        for layer, bias in b.biases.items():
            if float((a.biases[layer] - bias).abs().max()) > 1e-6:
                found.append(f"step {step}: bias of layer {layer}")
        moved = {n: distance(p, b.parameters[n], 0.0) for n, p in a.parameters.items() if n in b.parameters}
        wrong = sorted((e, n) for n, e in moved.items() if e > RELATIVE)[::-1]
        if wrong or a.parameters.keys() != b.parameters.keys():
            shown = ", ".join(f"{n} {e:.1e}" for e, n in wrong[:12])
            found.append(f"step {step}: {len(wrong)} of {len(b.parameters)} updated parameters differ: {shown}")
    return found


def worst(got: list[Seen], want: list[Seen]) -> float:
    """The largest relative distance of any gradient of any step."""
    return max(distance(g, b.gradients[n], b.grad_norm) for a, b in zip(got, want) for n, g in a.gradients.items())
