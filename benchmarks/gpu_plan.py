"""Everything of the project that needs a GPU, run in one go: device tests and benchmarks, by the list in gpu_plan.yaml.

    python benchmarks/gpu_plan.py --list                          # the steps, what each proves, its time limit
    python benchmarks/gpu_plan.py --out results                   # all that this machine has GPUs for
    python benchmarks/gpu_plan.py --out results --only kda,step   # steps whose names begin so
    python benchmarks/gpu_plan.py --out results --seconds 500     # begin no step that might not end in time

Steps of one GPU run first, one lane a GPU; those marked `alone` (timings) share their GPU with nothing, others run two at
a time (--beside N). Steps of two GPUs follow. A step that has passed is left out when the same --out is used again. A step at its limit
gets SIGABRT, which makes Python print where every thread stands, and is killed five seconds later. Each step has a log
in the output folder; summary.jsonl has a line for each, summary.md a table.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PLAN = Path(__file__).with_suffix(".yaml")
BESIDE = 2  # steps that may share a GPU
GRACE = 5.0  # seconds between SIGABRT and SIGKILL


@dataclasses.dataclass(frozen=True)
class Step:
    """command: bash, from the repository's root. seconds: its limit. alone: nothing else on its GPU meanwhile."""

    name: str
    command: str
    seconds: float
    proves: str
    gpus: int = 1
    alone: bool = False

    def __post_init__(self) -> None:
        if not self.name.replace("_", "").replace("-", "").isalnum():
            raise ValueError(f"step name {self.name!r}: use letters, digits, '-' and '_'")
        if self.gpus not in (1, 2):
            raise ValueError(f"step {self.name}: gpus is {self.gpus}; it must be 1 or 2")
        if not 0 < self.seconds <= 600:
            raise ValueError(f"step {self.name}: seconds is {self.seconds}; it must lie in (0, 600]")


@dataclasses.dataclass
class Running:
    step: Step
    gpus: list[int]
    process: subprocess.Popen[bytes]
    begun: float
    aborted: float | None = None


def read_plan(file: Path = PLAN) -> list[Step]:
    """The steps of a plan in order; a ValueError names the step and the field that is wrong."""
    known = {f.name for f in dataclasses.fields(Step)}
    steps = []
    for entry in yaml.safe_load(file.read_text()):
        if unknown := set(entry) - known:
            raise ValueError(f"step {entry.get('name')}: unknown fields {sorted(unknown)}; known are {sorted(known)}")
        if lacking := {"name", "command", "seconds", "proves"} - set(entry):
            raise ValueError(f"step {entry.get('name')}: fields {sorted(lacking)} are missing")
        steps.append(Step(**entry))
    names = [s.name for s in steps]
    if twice := {n for n in names if names.count(n) > 1}:
        raise ValueError(f"step names {sorted(twice)} appear twice")
    return steps


def visible_gpus() -> list[int]:
    """The numbers of this machine's GPUs, or those that CUDA_VISIBLE_DEVICES names."""
    import torch

    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [int(n) for n in named.split(",") if n.strip()]
    return list(range(torch.cuda.device_count()))


class Runner:
    def __init__(self, gpus: list[int], out: Path, seconds: float | None = None, beside: int = BESIDE) -> None:
        self.gpus, self.out, self.beside = gpus, out, beside
        self.begun = time.monotonic()
        self.until = None if seconds is None else self.begun + seconds
        self.running: list[Running] = []
        out.mkdir(parents=True, exist_ok=True)
        self.summary = out / "summary.jsonl"

    def run(self, steps: list[Step]) -> list[dict[str, object]]:
        """Run the steps; a record for each: name, rc (None: not begun), seconds, why where it was not begun."""
        records: list[dict[str, object]] = []
        for count in (1, 2):
            queue = [s for s in steps if s.gpus == count]
            while queue or self.running:
                for step in list(queue):
                    if len(self.gpus) < count:
                        records.append(self.left_out(step, f"needs {count} GPUs, there are {len(self.gpus)}"))
                    elif self.until is not None and time.monotonic() + step.seconds > self.until:
                        records.append(self.left_out(step, "might not end in time"))
                    elif (where := self.room(step)) is not None:
                        self.start(step, where)
                    else:
                        continue
                    queue.remove(step)
                records += self.finished()
                time.sleep(0.2)
        return records

    def room(self, step: Step) -> list[int] | None:
        """The GPUs on which the step may start now: the idlest first; None where there is no room."""
        on = {g: [r.step for r in self.running if g in r.gpus] for g in self.gpus}
        if step.alone or step.gpus > 1:
            free = [g for g in self.gpus if not on[g]]
        else:
            free = [g for g in self.gpus if len(on[g]) < self.beside and not any(s.alone or s.gpus > 1 for s in on[g])]
        free.sort(key=lambda g: len(on[g]))
        return free[: step.gpus] if len(free) >= step.gpus else None

    def start(self, step: Step, gpus: list[int]) -> None:
        env = dict(
            os.environ,
            CUDA_VISIBLE_DEVICES=",".join(map(str, gpus)), PYTHONFAULTHANDLER="1", PYTHONUNBUFFERED="1",
            OUT=str(self.out.resolve()),
            PYTHONPATH=os.pathsep.join([*(str(ROOT / f) for f in (".", "kernels", "data")), os.environ.get("PYTHONPATH", "")]),
        )  # fmt: skip
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // len(self.gpus)
        mine = {c for g in gpus for c in cores[self.gpus.index(g) * share :][:share]} or set(cores)
        with (self.out / f"{step.name}.log").open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", step.command], cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=lambda: os.sched_setaffinity(0, mine),
            )  # fmt: skip
        self.running.append(Running(step, gpus, process, time.monotonic()))

    def finished(self) -> list[dict[str, object]]:
        """Records of the steps that ended since; those past their limit are ended."""
        records: list[dict[str, object]] = []
        for job in list(self.running):
            now = time.monotonic()
            if job.process.poll() is None:
                if job.aborted is None and now - job.begun > job.step.seconds:
                    job.aborted = now
                    self.signal(job, signal.SIGABRT)
                elif job.aborted is not None and now - job.aborted > GRACE:
                    self.signal(job, signal.SIGKILL)
                continue
            self.signal(job, signal.SIGKILL)  # what it left behind would disturb the next
            self.running.remove(job)
            record = {"name": job.step.name, "rc": job.process.returncode, "seconds": round(now - job.begun, 1)}
            if job.aborted is not None:
                record["why"] = f"at its limit of {job.step.seconds:g} s"
            records.append(self.keep(record))
        return records

    @staticmethod
    def signal(job: Running, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, number)

    def left_out(self, step: Step, why: str) -> dict[str, object]:
        return self.keep({"name": step.name, "rc": None, "seconds": 0.0, "why": why})

    def keep(self, record: dict[str, object]) -> dict[str, object]:
        at = time.monotonic() - self.begun
        print(f"{at:6.0f} s  {record['name']}: {outcome(record)}", flush=True)
        with self.summary.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return record

    def passed_before(self) -> set[str]:
        if not self.summary.is_file():
            return set()
        return {r["name"] for r in map(json.loads, self.summary.read_text().splitlines()) if r["rc"] == 0}


def outcome(record: dict[str, object]) -> str:
    if record["rc"] is None:
        return f"not run ({record['why']})"
    word = "passed" if record["rc"] == 0 else f"FAILED (rc {record['rc']})"
    return f"{word}, {record['seconds']} s" + (f", {record['why']}" if "why" in record else "")


def table(steps: list[Step], records: list[dict[str, object]], out: Path) -> str:
    """Markdown: each step with its outcome, what it proves, and the last line that it printed."""
    rows = ["| step | outcome | proves | last line |", "|---|---|---|---|"]
    by_name = {r["name"]: r for r in records}
    for step in steps:
        if (record := by_name.get(step.name)) is None:
            continue
        log = out / f"{step.name}.log"
        lines = [x for x in log.read_text(errors="replace").splitlines() if x.strip()] if log.is_file() else []
        last = lines[-1].replace("|", "\\|")[:150] if lines else ""
        rows.append(f"| {step.name} | {outcome(record)} | {step.proves} | {last} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default=PLAN)
    parser.add_argument("--list", action="store_true", help="print the steps and stop")
    parser.add_argument("--out", type=Path, help="folder of logs and summary")
    parser.add_argument("--only", default="", help="first letters of names of steps, separated by commas")
    parser.add_argument("--skip", default="", help="likewise, of steps to leave out")
    parser.add_argument("--seconds", type=float, help="begin no step that might not end within so many")
    parser.add_argument("--beside", type=int, default=BESIDE, help="steps, other than timings, that may share a GPU")
    args = parser.parse_args()
    if args.beside < 1:
        parser.error(f"--beside {args.beside} must be 1 or more")
    steps = read_plan(args.plan)
    if args.only:
        steps = [s for s in steps if s.name.startswith(tuple(args.only.split(",")))]
    if args.skip:
        steps = [s for s in steps if not s.name.startswith(tuple(args.skip.split(",")))]
    if not steps:
        parser.error(f"--only {args.only!r} --skip {args.skip!r} leave no step; see --list")
    if args.list:
        for s in steps:
            print(f"{s.name:28} {s.gpus} GPU{'s' * (s.gpus > 1)} {s.seconds:4.0f} s {'alone' * s.alone:6} {s.proves}")
        return 0
    if args.out is None:
        parser.error("--out FOLDER is missing: the logs go there")
    gpus = visible_gpus()
    if not gpus:
        parser.error("no GPU is visible here; --list shows what would run")
    runner = Runner(gpus, args.out, args.seconds, args.beside)
    done = runner.passed_before()
    todo = [s for s in steps if s.name not in done]
    records = runner.run(todo)
    (args.out / "summary.md").write_text(table(todo, records, args.out))
    print((args.out / "summary.md").read_text())
    return 0 if all(r["rc"] == 0 for r in records) else 1


if __name__ == "__main__":
    sys.exit(main())
