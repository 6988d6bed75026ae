"""The comparisons of docs/results.md: which runs, over which seeds, and which recall tasks each answers at its end."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

MIXERS = ("linear", "delta", "gated_delta", "kda", "hybrid", "softmax")
TASKS = {
    "multi_query": ("pairs", "recall:multi_query,pairs={}", (2, 4, 6, 8, 12)),
    "overwrite": ("pairs, each written 3 times", "recall:overwrite,pairs={},rewrites=3", (1, 2, 3, 4, 6)),
    "needle": ("noise tokens in between", "recall:needle,pairs=4,distance={}", (4, 8, 16, 32)),
    "needle_long": ("noise tokens in between, 1,000 steps", "recall:needle,pairs=4,distance={}", (4, 8, 16, 32)),
    "forgetting": ("stale pairs before", "recall:forgetting,pairs=4,stale={}", (0, 4, 8, 16)),
}
"""Each recall task: what its picture's axis counts, a suite with that count open, and the counts that are asked."""

TRAINED = {
    "multi_query": "recall:multi_query,pairs=12,easiest=0.08",
    "overwrite": "recall:overwrite,pairs=6,rewrites=3,easiest=0.16",
    "needle": "recall:needle,pairs=4,distance=32,easiest=0.1",
    "needle_long": "recall:needle,pairs=4,distance=32,easiest=0.1",
    "forgetting": "recall:forgetting,pairs=4,stale=16,easiest=0.1",
}
"""What a model of each task is trained on: episodes of all sizes from `easiest` of the largest."""

ABLATIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "bound": {"-5 (baseline)": (), "none": ("model.kda.decay_bound=null",)},
    "residuals": {
        "off": ("model.attention_residuals=off",),
        "block (baseline)": (),
        "full": ("model.attention_residuals=full",),
    },
    "balancing": {
        "quantile (baseline)": (),
        "sign": ("model.balancing=sign",),
        "aux_loss": ("model.balancing=aux_loss",),
        "none": ("model.balancing=none",),
    },
    "optimizer": {
        "per-head Muon (baseline)": (),
        "whole-matrix Muon": ("optim=muon_matrix",),
        "AdamW": ("optim=adamw", "optim.lr=4e-3"),
    },
    "latent": {
        "norm and SiTU (baseline)": (),
        "no norm": ("model.moe.latent_norm=false",),
        "SwiGLU": ("model.activation=swiglu",),
        "neither": ("model.moe.latent_norm=false", "model.activation=swiglu"),
    },
}
"""Each ablation's arms and what they change in the baseline, experiment=ablation."""


@dataclass(frozen=True)
class Arm:
    """One run: `k3train train OVERRIDES run.seed=SEED`. suites: recall tasks answered after the last step."""

    group: str
    name: str
    overrides: tuple[str, ...]
    seed: int = 1
    suites: tuple[str, ...] = field(default=())

    @property
    def words(self) -> list[str]:
        """What is typed after `k3train train`, but for the folder's name."""
        return [*self.overrides, f"run.seed={self.seed}"]

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What a record of this arm is known by; the last part changes with the overrides or the suites."""
        text = " ".join([*self.words, "|", *self.suites])
        return self.group, self.name, self.seed, hashlib.sha256(text.encode()).hexdigest()[:12]


def mixer(name: str) -> tuple[str, ...]:
    """Overrides of a rung; the hybrid is three KDA layers to one of attention."""
    return ("model.hybrid=3:1",) if name == "hybrid" else (f"model.mixer={name}",)


def suites(task: str) -> tuple[str, ...]:
    """The recall tasks of one kind, from the smallest."""
    _, text, counts = TASKS[task]
    return tuple(text.format(count) for count in counts)


LONGER = {"needle_long": ("train.steps=1000",)}
"""Tasks that not every rung learns in the experiment's own steps, once more with more of them, one seed."""


def recall(seeds: int) -> list[Arm]:
    """Every rung on every recall task; whole seeds one after the other, so that a cut run still compares."""
    return [
        Arm(
            task,
            name,
            ("experiment=ladder", f'data.corpus="{TRAINED[task]}"', *LONGER.get(task, ()), *mixer(name)),
            seed,
            suites(task),
        )  # fmt: skip
        for seed in range(1, seeds + 1)
        for task in sorted(TASKS, key=lambda task: task not in LONGER)
        for name in MIXERS
        if seed == 1 or task not in LONGER
    ]


def text(seeds: int) -> list[Arm]:
    """Every rung on text but the hybrid, which is the baseline of the ablations."""
    names = [name for name in MIXERS if name != "hybrid"]
    return [Arm("text", n, ("experiment=ladder_text", *mixer(n)), seed) for seed in range(1, seeds + 1) for n in names]


def ablations(seeds: int) -> list[Arm]:
    """The baseline and every departure from it."""
    departures: dict[tuple[str, ...], str] = {}
    for kind, arms in ABLATIONS.items():
        for name, changed in arms.items():
            departures.setdefault(changed, f"{kind}: {name}" if changed else "baseline")
    return [
        Arm("ablation", name, ("experiment=ablation", *changed), seed)
        for seed in range(1, seeds + 1)
        for changed, name in departures.items()
    ]


COMPARISONS = {"recall": recall, "text": text, "ablation": ablations}
"""Comparison -> its arms over so many seeds; the records of each are docs/results/NAME.jsonl."""
