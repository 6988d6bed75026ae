"""How long training steps wait for a checkpoint, in place and behind the steps.

    python benchmarks/checkpoint_wait.py [--steps 12] [override ...]

Trains a few steps on this machine, saving every third, once with checkpoint.async_save=false and once with true, and
prints the median of seconds waited and of seconds until the checkpoint was whole, from the runs' own metrics.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def measure(folder: Path, steps: int, behind: bool, overrides: list[str]) -> tuple[float, float, float]:
    """Medians over all saves but the first: (seconds waited, seconds of the save, seconds of a step)."""
    name = "behind" if behind else "in_place"
    words = [
        "train=smoke", f"train.steps={steps}", "train.sample_tokens=0", "train.eval_every=100000", "checkpoint.every=3",
        "tracking.wandb=disabled", f"run.dir={folder}", f"run.name={name}", f"checkpoint.async_save={behind}".lower(),
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "k3train.cli", "train", *words, *overrides], check=True, stdout=sys.stderr)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    saves = [r for r in records if "checkpoint/save_seconds" in r][1:]
    return (
        statistics.median(r["checkpoint/waited_seconds"] for r in saves),
        statistics.median(r["checkpoint/save_seconds"] for r in saves),
        statistics.median(r["train/step_seconds"] for r in records if "train/step_seconds" in r),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for behind in (False, True):
            waited, took, step = measure(Path(folder), args.steps, behind, args.overrides)
            print(
                f"{'behind the steps' if behind else 'in place':<17} waited {waited:7.3f} s, whole after {took:7.3f} s "
                f"({100 * waited / took:5.1f} %), a step {step:.3f} s"
            )


if __name__ == "__main__":
    main()
