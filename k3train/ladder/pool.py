"""Many arms, some at a time, each in a process forked from one that has imported everything; records appended as lines.

Run again, it trains what is missing: an arm whose record is in the file already is left out.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import shlex
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from k3train.ladder.arms import TASKS, Arm

PRELOAD = "k3train.ladder.preload"


def records(file: Path) -> list[dict[str, Any]]:
    """The records of a file, without a torn last line; none where there is no file."""
    found = []
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def file_of(arm: Arm, folder: Path) -> Path:
    """Where the record of an arm goes: the recall tasks share a file, other groups have their own."""
    return folder / f"{'recall' if arm.group in TASKS else arm.group}.jsonl"


def missing(arms: Sequence[Arm], folder: Path) -> list[Arm]:
    """The arms without a record of their seed, overrides and suites, in order."""
    done = {
        (r["group"], r["arm"], r["seed"], r["key"])
        for file in {file_of(arm, folder) for arm in arms}
        for r in records(file)
    }
    return [arm for arm in arms if arm.key not in done]


def run_arm(arm: Arm, text: str | None = None, also: Sequence[str] = ()) -> dict[str, Any]:
    """Train one arm here; its record. text: the prefix of a prepared dataset to read in place of the corpus.

    also: overrides of how a machine computes, not of what is compared; the record names them, the arm's key does not.
    Captured steps are left out for the mixer that no graph can hold.
    """
    from k3train.config.compose import compose
    from k3train.ladder.train import train_arm

    if "model.mixer=linear" in arm.words:
        also = [word for word in also if not word.startswith("train.cuda_graphs=")]
    where = [f"data.prefix={text}"] if text and arm.group not in TASKS else []
    numbers = train_arm(compose([*arm.words, *where, *also]), list(arm.suites))
    group, name, seed, key = arm.key
    words = {"words": shlex.join(arm.words), **({"also": shlex.join(also)} if also else {})}
    return {"group": group, "arm": name, "seed": seed, "key": key, **words, **numbers}


def cannot_use_gpu() -> bool:
    """In a forked process: whether the one that it was forked from has asked CUDA something, which breaks it here."""
    import torch

    return bool(torch.cuda._is_in_bad_fork())


def _context(say: Callable[[str], None]) -> Any:
    """How processes are made: forked from one that has imported everything, or, where those could not use the GPU,
    each from nothing."""
    forked = mp.get_context("forkserver")
    forked.set_forkserver_preload([PRELOAD])
    with ProcessPoolExecutor(1, forked) as pool:
        if not pool.submit(cannot_use_gpu).result():
            return forked
    say("a forked process could not use the GPU here: each arm imports everything for itself")
    return mp.get_context("spawn")


def run_all(
    arms: Sequence[Arm], folder: Path, *, workers: int = 1, seconds: float | None = None,
    text: str | None = None, also: Sequence[str] = (), say: Callable[[str], None] = print,
) -> int:  # fmt: skip
    """Train the missing arms in `workers` processes at a time and append each record to its file in `folder`.

    seconds: no arm is begun after so many. text, also: as for `run_arm`. Returns how many failed; their tracebacks are said.
    """
    todo = missing(arms, folder)
    folder.mkdir(parents=True, exist_ok=True)
    say(f"{folder}: {len(arms) - len(todo)} of {len(arms)} arms are there, {len(todo)} to train")
    if not todo:
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begin, failed, trained = time.monotonic(), 0, 0
    context = _context(say)
    queue = iter(todo)
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        running = {pool.submit(run_arm, arm, text, also): arm for _, arm in zip(range(workers), queue)}
        while running:
            future = next(as_completed(running))
            arm = running.pop(future)
            try:
                record = future.result()
                with file_of(arm, folder).open("a") as out:
                    out.write(json.dumps(record) + "\n")
                trained += 1
                say(f"{arm.group}/{arm.name} seed {arm.seed}: {summary(record)}")
            except Exception:
                failed += 1
                say(f"{arm.group}/{arm.name} seed {arm.seed} failed:\n{traceback.format_exc()}")
            following = next(queue, None) if seconds is None or time.monotonic() - begin < seconds else None
            if following is not None:
                running[pool.submit(run_arm, following, text, also)] = following
    say(f"{trained} of {len(todo)} arms in {time.monotonic() - begin:.0f} s, {workers} at a time; {failed} failed")
    return failed


def summary(record: dict[str, Any]) -> str:
    """A record in a line."""
    shown = f"{record['steps']} steps in {record['seconds']} s"
    if record["valid"]:
        step, loss, *accuracy = record["valid"][-1]
        shown += f", validation loss {loss:.4f}" + (f", accuracy {accuracy[0]:.3f}" if accuracy else "")
    if "accuracy" in record:
        shown += " | " + " ".join(f"{value:.2f}" for value in record["accuracy"].values())
    return shown
