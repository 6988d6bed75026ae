"""The child process that owns wandb: reads JSON lines from its standard input, logs them, finishes at the end.

It outlives a trainer that was killed by just long enough to finish the run's files. It ignores the signals that a
scheduler sends to every process of a job, because the trainer ends it by closing the pipe.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from k3train.tracking.jsonl import _revive
from k3train.tracking.wandb import JOB_SIGNALS

LIST_LIMIT = 512  # longer plain lists are not spread into one series per item


def read_commands(fd: int, parent: int) -> Iterator[dict[str, Any]]:
    """Yield commands until the pipe closes, or the parent is gone although some forked child still holds the pipe."""
    waiting = b""
    while True:
        ready, _, _ = select.select([fd], [], [], 5.0)
        if not ready:
            if parent and os.getppid() != parent:
                return
            continue
        chunk = os.read(fd, 1 << 20)
        if not chunk:
            return
        *lines, waiting = (waiting + chunk).split(b"\n")
        for line in lines:
            command = json.loads(line)
            parent = parent or int(command.get("parent", 0))
            yield command


class Refused(Exception):
    """W&B would not open an online run."""


class Mirror:
    """Applies commands to one wandb run; steps never decrease, also across restarts."""

    def __init__(self, hello: Mapping[str, Any]) -> None:
        self.folder = Path(hello["run_dir"]) / "wandb"
        self.status_path = self.folder / "mirror.json"
        self.media_every = max(int(hello["media_every"]), 1)
        self.media_step: dict[str, int] = {}
        self.late_media: dict[str, tuple[int, list[list[float]]]] = {}
        self.extras: dict[str, Any] = {}
        self.logged = self.skipped = 0
        self.current: int | None = None
        self.stamp: float | None = None
        self.error = str(hello.get("refused", ""))
        self.status_time = 0.0
        before = json.loads(self.status_path.read_text()) if self.status_path.exists() else {}
        same_run = before.get("run_id") == hello["run_id"]
        self.run_id = hello["run_id"]
        self.run, self.mode = self._init(hello)
        self.floor = int(before.get("last_step", -1)) if same_run else -1
        if self.mode == "online" and self.run.resumed:
            self.floor = max(self.floor, int(self.run.step) - 1)
        self.last_step = self.floor
        self.write_status(force=True)

    def _init(self, hello: Mapping[str, Any]) -> tuple[Any, str]:
        import wandb

        self.wandb = wandb
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, save_code=False, x_save_requirements=False,
            init_timeout=hello["init_timeout_s"], x_stats_pid=int(hello["parent"]),
            x_disable_stats=not Path("/dev/nvidiactl").exists(),
        )  # fmt: skip
        try:
            run = wandb.init(
                project=hello["project"], entity=hello["entity"], group=hello["group"], tags=list(hello["tags"]),
                name=hello["run_name"], id=hello["run_id"], dir=hello["run_dir"], config=dict(hello["config"]),
                mode=hello["mode"], resume="allow", settings=settings,
            )  # fmt: skip
        except Exception as error:  # a bad key, a dead network, a refused project
            if hello["mode"] != "online":
                raise
            raise Refused(f"{type(error).__name__}: {error}") from error
        return run, hello["mode"]

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step <= self.floor or (self.current is not None and step < self.current):
            self.skipped += 1
            return
        row: dict[str, Any] = dict(self.extras)
        self.extras.clear()
        for key, value in metrics.items():
            if key in ("step", "time"):
                continue
            row.update(self._spread(key, value, step))
        self.run.log(row, step=step)
        self.current = self.last_step = step
        self.stamp = metrics.get("_timestamp")
        self.logged += 1
        self.write_status()

    def _spread(self, key: str, value: Any, step: int) -> dict[str, Any]:
        """A number stays; a list becomes one series an item; a matrix becomes a heatmap and a table now and then."""
        value = _revive(value)
        if not isinstance(value, list):
            return {} if value is None else {key: value}
        if value and all(isinstance(row, list) for row in value):
            last = self.media_step.get(key)
            if last is not None and step - last < self.media_every:
                self.late_media[key] = (step, value)
                return {}
            self.media_step[key] = step
            self.late_media.pop(key, None)
            return self._media(key, value)
        if len(value) > LIST_LIMIT:
            return {}
        return {f"{key}/{index:02d}": item for index, item in enumerate(value)}

    def _media(self, key: str, matrix: list[list[float]]) -> dict[str, Any]:
        from k3train.tracking.heatmap import heatmap_image

        centre = 1.0 if key == "moe/load" else None
        names = ("layer", "expert", "load") if key == "moe/load" else ("row", "column", "value")
        cells = [[i, j, x] for i, row in enumerate(matrix) for j, x in enumerate(row)]
        image = heatmap_image(matrix, centre=centre)
        return {
            f"{key}_heatmap": self.wandb.Image(image, caption=f"{key}: {names[0]} down, {names[1]} across"),
            f"{key}_table": self.wandb.Table(columns=list(names), data=cells),
        }

    def event(self, kind: str, message: str) -> None:
        key = f"event/{kind}"
        self.extras[key] = f"{self.extras[key]}\n{message}" if key in self.extras else message

    def finish(self) -> None:
        """The last step is still open in wandb: give it what came late, then close the run."""
        if self.current is not None:
            row = dict(self.extras)
            for key, (step, matrix) in self.late_media.items():
                if step == self.current:
                    row.update(self._media(key, matrix))
            if row and self.stamp is not None:
                row["_timestamp"] = self.stamp  # a replayed step keeps its own time
            if row:
                self.run.log(row, step=self.current)
        self.run.finish()
        self.write_status(force=True, finished=True)

    def write_status(self, *, force: bool = False, finished: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self.status_time < 1.0:
            return
        self.status_time = now
        beside = self.status_path.with_name("mirror.json.tmp")
        beside.write_text(json.dumps({
            "run_id": self.run_id, "mode": self.mode, "last_step": self.last_step, "logged": self.logged,
            "skipped": self.skipped, "error": self.error, "folder": str(Path(self.run.dir).parent),
            "finished": finished,
        }))  # fmt: skip
        beside.replace(self.status_path)


def read_first(fd: int) -> dict[str, Any] | None:
    """Read the first line and not a byte more: what follows must still be in the pipe if this process starts anew."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            return None
        line += byte
    return json.loads(line)


def start_offline(hello: Mapping[str, Any], reason: str) -> NoReturn:
    """Replace this process by one that runs offline; wandb's half-open online run cannot be undone in the same one."""
    text = f"online refused ({reason}); the run is kept offline"
    print(text, file=sys.stderr, flush=True)
    path = Path(hello["run_dir"]) / "wandb" / "mirror.hello.json"
    path.write_text(json.dumps({**hello, "mode": "offline", "refused": text}))
    for name in [name for name in os.environ if name.startswith("WANDB_SERVICE") or name.startswith("_WANDB")]:
        del os.environ[name]  # the address of the service that serves the refused run
    os.execv(sys.executable, [sys.executable, "-m", "k3train.tracking.wandb_worker", str(path)])


def main(words: Sequence[str] = ()) -> int:
    numbers = [getattr(signal, name) for name in JOB_SIGNALS]
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # blocked until here by who started this process
    if words:
        hello: dict[str, Any] | None = json.loads(Path(words[0]).read_text())
        Path(words[0]).unlink()
    else:
        hello = read_first(sys.stdin.fileno())
    if hello is None:
        return 0
    try:
        mirror = Mirror(hello)
    except Refused as error:
        start_offline(hello, str(error))
    commands = read_commands(sys.stdin.fileno(), os.getppid())
    for command in commands:
        try:
            if command["kind"] == "log":
                mirror.log(int(command["step"]), command["metrics"])
            else:
                mirror.event(command["event"], command["message"])
        except Exception:  # one record that wandb refuses must not cost the others
            mirror.error = traceback.format_exc(limit=3)
            print(mirror.error, file=sys.stderr, flush=True)
    mirror.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
