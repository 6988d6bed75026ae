"""A stand-in for training. Each process notes what it saw in $FAKE_OUT; $FAKE_DO says what happens on which rank."""

import json
import os
import sys
import time
from pathlib import Path

from k3train import signals
from k3train.config.schema import Config
from k3train.errors import DataError


def run(config: Config) -> int:
    rank = int(os.environ.get("RANK", "0"))
    seen = {
        "rank": rank,
        "world": int(os.environ.get("WORLD_SIZE", "1")),
        "argv": sys.argv[1:],
        "bound": config.model.kda.decay_bound,
        "name": config.run.name,
        "pid": os.getpid(),
        "node": os.environ.get("SLURMD_NODENAME"),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    out = Path(os.environ["FAKE_OUT"])
    (out / f"{config.run.name}.{rank}.json").write_text(json.dumps(seen))
    print(f"hello from rank {rank}", flush=True)
    for order in os.environ.get("FAKE_DO", "").split():
        action, _, whom = order.partition("@")
        if not whom or int(whom) == rank:
            code = pretend(config, rank, action) if action.startswith("run:") else act(action)
            if code is not None:
                return code
    return 0


def act(action: str) -> int | None:
    if action == "user_error":
        raise DataError("the corpus is a teapot; give it tea")
    broken = Path(os.environ["FAKE_OUT"], "broken")
    if action == "fault":
        broken.touch()
        raise RuntimeError("something broke inside")
    if action == "late_fault":
        until = time.monotonic() + 30
        while not broken.exists() and time.monotonic() < until:  # a slow machine may start the other rank much later
            time.sleep(0.02)
        time.sleep(1.5)
        raise RuntimeError("a consequence")
    if action == "kill":
        broken.touch()
        os.kill(os.getpid(), 9)
    if action == "hang":
        time.sleep(300)
    if action == "wait_for_signal":
        signals.listen()
        Path(os.environ["FAKE_OUT"], f"ready.{os.environ.get('RANK', '0')}").touch()
        until = time.monotonic() + 60
        while signals.asked() is None and time.monotonic() < until:
            time.sleep(0.02)
        Path(os.environ["FAKE_OUT"], f"signal.{os.environ.get('RANK', '0')}").write_text(str(signals.asked()))
        return 75
    return None


def pretend(config: Config, rank: int, action: str) -> int:
    """run:STEPS:SECONDS - steps that are noted, a stop with a checkpoint when asked, going on from the newest."""
    steps, pause = action.split(":")[1:]
    signals.listen()
    folder = Path(config.run.dir) / config.run.name
    saved = folder / "checkpoints"
    saved.mkdir(parents=True, exist_ok=True)
    begin = max((int(p.name.removeprefix("step-")) for p in saved.iterdir()), default=0)
    for step in range(begin + 1, int(steps) + 1):
        time.sleep(float(pause))
        with (folder / f"steps.{rank}").open("a") as file:
            file.write(f"{step}\n")
        done = step == int(steps)
        if done or signals.asked() is not None:
            if rank == 0:
                (saved / f"step-{step:08d}").mkdir(exist_ok=True)
            return 0 if done else 75
    return 0
