"""Does FP8 train like BF16? The same model and data under both, beside BF16 runs of other seeds.

    python benchmarks/fp8_loss.py [--steps 300] [--arms bf16-0,fp8_current-0] [--seconds 150] [--json out.json]

A model of K3's proportions (about 0.2 B parameters) learns a random Markov source of known entropy: 8192 tokens a step.
Arms run one after another in one process, in captured steps, and each is printed as it ends; no arm begins after --seconds.
What is compared is the mean loss of the last 50 steps: the distance of an FP8 run from the BF16 run of its seed, against
the spread of BF16 over seeds. `experts-0` has the experts in FP8 too: their sizes are read by the host, so it cannot be
captured and takes some minutes; it runs only where it is asked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "data"), str(ROOT / "benchmarks")]

VOCABULARY, SUCCESSORS, LENGTH, SEQUENCES = 4096, 8, 1024, 8
MODEL = [
    "model=k3_proxy", "run.name=fp8_loss", "tracking.wandb=disabled", f"model.vocab_size={VOCABULARY}",
    "model.hidden_size=768", "model.dense_hidden=2048", "model.kda.heads=6", "model.mla.heads=6",
    "model.mla.q_lora_rank=256", "model.mla.kv_lora_rank=256", "model.moe.experts=32", "model.moe.expert_hidden=384",
    "model.moe.latent=384", f"train.seq_length={LENGTH}", f"train.micro_batch={SEQUENCES}",
    f"train.global_batch={SEQUENCES}", "model.backend=te",
]  # fmt: skip
ALL = "train.bf16_parts=[kda_gates,router,attention_residuals,norms,head]"
GRAPHS = "train.cuda_graphs=step"
BF16 = ["train.precision=bf16", GRAPHS]
ARMS: dict[str, tuple[int, list[str]]] = {
    "bf16-0": (0, BF16),
    "fp8_current-0": (0, ["train.precision=fp8_current", GRAPHS]),
    "fp8_block-0": (0, ["train.precision=fp8_block", GRAPHS]),
    "bf16-1": (1, BF16),
    "bf16-2": (2, BF16),
    "fp8_once-0": (0, ["train.precision=fp8_current", "train.fp8_cache_weights=true", GRAPHS]),
    "fp8_current-1": (1, ["train.precision=fp8_current", GRAPHS]),
    "fp8_current-2": (2, ["train.precision=fp8_current", GRAPHS]),
    "activations-0": (0, [*BF16, "train.activations.units=fp8", "train.activations.gates=fp8"]),
    "experts-0": (0, ["train.precision=fp8_block", ALL]),
}  # fmt: skip
"""Arm -> seed and overrides. The number behind the name is the seed."""


def source(seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """One micro-batch a step. The source is the same for every seed; what it emits is not."""
    import numpy as np
    import torch

    table = np.random.default_rng(0).integers(0, VOCABULARY, (VOCABULARY, SUCCESSORS))
    weight = 1.0 / np.arange(1, SUCCESSORS + 1)
    rng = np.random.default_rng(seed + 1)
    tokens = np.empty((steps * SEQUENCES, LENGTH + 1), dtype=np.int64)
    tokens[:, 0] = rng.integers(0, VOCABULARY, len(tokens))
    choice = rng.choice(SUCCESSORS, tokens.shape, p=weight / weight.sum())
    for t in range(1, LENGTH + 1):
        tokens[:, t] = table[tokens[:, t - 1], choice[:, t]]
    borders = torch.arange(0, SEQUENCES + 1, dtype=torch.int32) * LENGTH
    for step in range(steps):
        rows = torch.from_numpy(tokens[step * SEQUENCES : (step + 1) * SEQUENCES])
        yield {
            "tokens": rows[:, :-1].reshape(-1).contiguous(), "labels": rows[:, 1:].reshape(-1).contiguous(),
            "loss_mask": torch.ones(SEQUENCES * LENGTH), "cu_seqlens": borders,
        }  # fmt: skip


def entropy() -> float:
    """Nats a token that no model can beat (successors of a state that coincide are ignored)."""
    import math

    weight = [1.0 / i for i in range(1, SUCCESSORS + 1)]
    return -sum(w / sum(weight) * math.log(w / sum(weight)) for w in weight)


def rate_of(step: int, steps: int) -> float:
    """Learning rate: 30 steps of warm-up, and a fall to a tenth over the last fifth."""
    return 1e-3 * min(1.0, (step + 1) / 30) * (1.0 if step < steps * 0.8 else max(0.1, 5 * (1 - step / steps)))


def train(name: str, steps: int, extra: list[str], norms: list[float] | None = None) -> list[float]:
    """The losses of one arm; the gradient norms of its steps are added to `norms`."""
    from step import make_engine, release

    from k3train.config.compose import compose

    seed, overrides = ARMS[name]
    engine = make_engine(compose([*MODEL, *overrides, *extra, f"run.seed={1234 + seed}"]))
    losses = []
    try:
        for step, batch in enumerate(source(seed, steps)):
            result = engine.step(iter([batch]), rate_of(step, steps), 1)
            losses.append(result.loss)
            if norms is not None:
                norms.append(result.grad_norm)
        return losses
    finally:
        release(engine)


def compared(losses: dict[str, list[float]]) -> list[str]:
    """What the arms that ran say about each other."""
    ends = {name: statistics.mean(x[-50:]) for name, x in losses.items()}
    bf16 = [end for name, end in ends.items() if name.startswith("bf16")]
    lines = []
    if len(bf16) > 1:
        spread = f"standard deviation {statistics.stdev(bf16):.4f}, range {max(bf16) - min(bf16):.4f}"
        lines.append(f"bf16 over {len(bf16)} seeds: {spread}")
    for name, end in ends.items():
        beside = f"bf16-{name.rpartition('-')[2]}"
        if not name.startswith("bf16") and beside in ends:
            lines.append(f"{name:16} minus {beside}: {end - ends[beside]:+.4f}")
    return lines


def main() -> None:
    usual = [name for name in ARMS if not name.startswith("experts")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--arms", default=",".join(usual), help=f"some of {', '.join(ARMS)}")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no arm after so long")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    unknown = set(options.arms.split(",")) - set(ARMS)
    if unknown:
        parser.error(f"--arms: {', '.join(sorted(unknown))}: not one of {', '.join(ARMS)}")
    from k3train import platform

    platform.install()
    begin = time.monotonic()
    print(
        f"{options.steps} steps of {SEQUENCES * LENGTH} tokens; the source's entropy is {entropy():.4f} nats",
        flush=True,
    )
    losses: dict[str, list[float]] = {}
    norms: dict[str, list[float]] = {}
    for name in options.arms.split(","):
        if time.monotonic() - begin > options.seconds:
            print(f"{name}: not run, {options.seconds:.0f} s are over", flush=True)
            continue
        start = time.monotonic()
        try:
            losses[name] = train(name, options.steps, options.overrides, norms.setdefault(name, []))
        except Exception as error:  # the other arms are still worth their time
            print(f"{name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
            continue
        x, norm = losses[name], norms[name]
        leaves = next((i for i, loss in enumerate(x) if loss < x[0] - 1.0), None)
        print(
            f"{name:16} first {x[0]:.4f}  last 50 {statistics.mean(x[-50:]):.4f}  a nat below the first at step {leaves}  "
            f"largest gradient norm {max(norm):.2f} at {norm.index(max(norm))}  in {time.monotonic() - start:.0f} s",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps({"losses": losses, "grad_norms": norms}, indent=1))
    print("\n".join(compared(losses)))


if __name__ == "__main__":
    main()
