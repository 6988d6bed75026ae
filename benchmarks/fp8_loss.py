"""Does FP8 train like BF16? The same model and data under both, beside BF16 runs of other seeds.

    python benchmarks/fp8_loss.py [--steps 300] [--json out.json]

A model of K3's proportions (about 0.2 B parameters) learns a random Markov source of known entropy: 8192 tokens a step.
Every arm is a process of its own; they run beside each other on one GPU. What is compared is the mean loss of the last
50 steps: the distance of an FP8 run from the BF16 run of its seed, against the spread of BF16 over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "data")]

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
ARMS: dict[str, tuple[int, list[str]]] = {
    "bf16, seed 0": (0, ["train.precision=bf16", GRAPHS]),
    "bf16, seed 1": (1, ["train.precision=bf16", GRAPHS]),
    "bf16, seed 2": (2, ["train.precision=bf16", GRAPHS]),
    "fp8_block": (0, ["train.precision=fp8_block", GRAPHS]),
    "fp8_current": (0, ["train.precision=fp8_current", GRAPHS]),
    "fp8_block, experts too": (0, ["train.precision=fp8_block", ALL]),
}


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


def train(name: str, steps: int, out: Path) -> None:
    from k3train import launch, platform

    platform.install()
    import torch

    from k3train.config.compose import compose
    from k3train.engine.megatron import MegatronEngine
    from k3train.parallel import layout as layouts

    seed, overrides = ARMS[name]
    config = compose([*MODEL, *overrides, f"run.seed={1234 + seed}"])
    place = launch.init_distributed(config)
    platform.install_adam()
    layout = layouts.initialize(layouts.sizes_from_config(config.parallel, place.world))
    engine = MegatronEngine(config, layout, torch.device("cuda"))
    losses = []
    for step, batch in enumerate(source(seed, steps)):
        rate = 1e-3 * min(1.0, (step + 1) / 30) * (1.0 if step < steps * 0.8 else max(0.1, 5 * (1 - step / steps)))
        losses.append(engine.step(iter([batch]), rate, 1).loss)
    out.write_text(json.dumps(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        train(options.arm, options.steps, options.out)
        return
    folder = Path(tempfile.mkdtemp())
    jobs = {}
    for i, name in enumerate(ARMS):
        command = [
            sys.executable,
            __file__,
            "--steps",
            str(options.steps),
            "--arm",
            name,
            "--out",
            str(folder / str(i)),
        ]
        log = (folder / f"{i}.log").open("w")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_"))}
        jobs[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    losses: dict[str, list[float]] = {}
    for i, (name, job) in enumerate(jobs.items()):
        if job.wait() == 0:
            losses[name] = json.loads((folder / str(i)).read_text())
        else:
            print(f"{name}: failed\n" + "\n".join((folder / f"{i}.log").read_text().splitlines()[-4:]))
    ends = {name: statistics.mean(x[-50:]) for name, x in losses.items()}
    print(f"{options.steps} steps of {SEQUENCES * LENGTH} tokens; the source's entropy is {entropy():.4f} nats")
    for name, x in losses.items():
        print(f"{name:28} first {x[0]:.4f}  last 50 {ends[name]:.4f}")
    bf16 = [end for name, end in ends.items() if name.startswith("bf16")]
    if len(bf16) > 1 and "bf16, seed 0" in ends:
        print(f"bf16 over seeds: standard deviation {statistics.stdev(bf16):.4f}, range {max(bf16) - min(bf16):.4f}")
        for name, end in ends.items():
            if name.startswith("fp8"):
                print(f"{name:28} minus bf16 of the same seed: {end - ends['bf16, seed 0']:+.4f}")
    if options.json:
        options.json.write_text(json.dumps({"losses": losses, "last_50": ends}, indent=1))


if __name__ == "__main__":
    main()
