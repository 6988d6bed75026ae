"""The numbers of docs/results.md: train the arms of a comparison, then write tables and pictures.

    python benchmarks/results.py run recall text ablation --workers 2   # resumable: what has a record is left out
    python benchmarks/results.py steps                                  # step time with and without a decay bound
    python benchmarks/results.py write                                  # tables and pictures from docs/results/*.jsonl

Each arm is `k3train train` with the words in its record, on one CPU thread (or on the GPU, if there is one), without
checkpoints and W&B. CUDA_VISIBLE_DEVICES= keeps a machine's GPU out of it. Many arms share one GPU, and records go into
a folder of their own:

    python benchmarks/results.py --folder runs/results run recall text ablation --workers 12 \\
        --also model.backend=torch --also train.cuda_graphs=step
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "kernels", ROOT / "data"):
    sys.path.insert(0, str(folder))
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3] + [os.environ.get("PYTHONPATH", "")])

from k3train.ladder import arms as catalogue  # noqa: E402
from k3train.ladder.arms import COMPARISONS  # noqa: E402


def run(args: argparse.Namespace) -> int:
    from k3train.ladder.pool import run_all

    wanted = [arm for name in args.comparisons for arm in COMPARISONS[name](args.seeds)]
    # a run that is cut short still compares; the longest arms do not come last
    wanted.sort(key=lambda arm: (arm.seed, arm.group not in catalogue.LONGER))
    failed = run_all(wanted, args.folder, workers=args.workers, seconds=args.seconds, text=args.text, also=args.also)
    return 1 if failed else 0


def steps(args: argparse.Namespace) -> int:
    from k3train.config.compose import compose
    from k3train.ladder.steps import in_turn

    words = args.override or ["experiment=ablation"]
    first, second = (compose([*words, f"model.kda.decay_bound={bound}"]) for bound in ("-5.0", "null"))
    record = in_turn(first, second, pairs=args.pairs)
    args.folder.mkdir(parents=True, exist_ok=True)
    with (args.folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps({**record, "words": " ".join(words)}) + "\n")
    print(json.dumps(record))
    return 0


def write(args: argparse.Namespace) -> int:
    from k3train.ladder.pictures import draw
    from k3train.ladder.tables import fill, tables

    page = args.folder.with_suffix(".md")
    page.write_text(fill(page.read_text(), tables(args.folder)))
    print(page, *draw(args.folder))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "results", help="where the records are")
    verbs = parser.add_subparsers(required=True)
    runs = verbs.add_parser("run", help="train what has no record yet")
    runs.add_argument("comparisons", nargs="+", choices=list(catalogue.COMPARISONS))
    runs.add_argument("--seeds", type=int, default=3)
    runs.add_argument("--workers", type=int, default=1, help="arms at a time")
    runs.add_argument("--seconds", type=float, help="begin no arm after so many")
    runs.add_argument("--text", help="prefix of the prepared default corpus, where it cannot be prepared anew")
    runs.add_argument("--also", action="append", default=[], help="how to compute, such as train.cuda_graphs=step")
    runs.set_defaults(call=run)
    timed = verbs.add_parser("steps", help="step times with the decay bound and without, in turn")
    timed.add_argument("--pairs", type=int, default=30)
    timed.add_argument("--override", action="append", default=[])
    timed.set_defaults(call=steps)
    verbs.add_parser("write", help="tables and pictures").set_defaults(call=write)
    args = parser.parse_args()
    return int(args.call(args))


if __name__ == "__main__":
    sys.exit(main())
