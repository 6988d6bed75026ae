"""The W&B mirror of a run, as a child process that the trainer can never wait for.

The trainer hands records to a bounded queue; a thread writes them into the child's pipe; the child (`wandb_worker`)
owns wandb. So the 2-8 s import of wandb, a dead network, a blocked upload or a crash of wandb cost no step a
millisecond: at worst records are dropped from the mirror, and counted. `metrics.jsonl` has them all, and
`k3train track replay` can mirror them later.

One W&B id belongs to a run for its life. It is kept in `wandb_id.txt` in the run folder and in every checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import queue
import secrets
import signal
import string
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from k3train.errors import ConfigError
from k3train.tracking.jsonl import encode_line

JOB_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
"""What a scheduler sends to every process of a job, and the worker has nothing to do with."""

MODES = ("auto", "offline", "online", "disabled")
_HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")  # default servers of wandb 0.31 and before it
_ID_ALPHABET = string.ascii_lowercase + string.digits


@dataclass(frozen=True)
class WandbSettings:
    """How the mirror behaves.

    Attributes:
        mode: `auto` is online when a key is found and offline otherwise; never a prompt in any mode.
        media_every: steps between two heatmaps (an image and a table each) of the same metric.
        init_timeout_s: patience with the server before the run falls back to offline.
        close_timeout_s: patience at the end of a run before the child is left to its fate (killed; its files stay).
        queue_records, queue_bytes: what may wait in memory while the child is slow.
    """

    mode: str = "auto"
    project: str = "k3train"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    media_every: int = 50
    init_timeout_s: float = 30.0
    close_timeout_s: float = 60.0
    queue_records: int = 20_000
    queue_bytes: int = 64 << 20


def has_api_key(environ: Mapping[str, str] = os.environ) -> bool:
    """Is there a W&B credential: `WANDB_API_KEY`, an identity token file, or a netrc entry of the server's host."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts = list(_HOSTS)
    if base_url := environ.get("WANDB_BASE_URL"):
        hosts = [urlsplit(base_url).hostname or base_url]
    path = Path(environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        entries = netrc.netrc(str(path)).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any(host in entries for host in hosts)


def resolve_mode(mode: str, environ: Mapping[str, str] = os.environ) -> str:
    """`auto` -> `online` or `offline`; `WANDB_MODE` and `WANDB_DISABLED` in the environment are obeyed by `auto`."""
    if mode not in MODES:
        raise ConfigError(f"tracking.wandb={mode!r}: use one of {', '.join(MODES)}")
    if mode != "auto":
        return mode
    wanted = environ.get("WANDB_MODE", "")
    if wanted in ("disabled", "offline"):
        return wanted
    if environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes"):
        return "disabled"
    return "online" if has_api_key(environ) else "offline"


def new_run_id() -> str:
    """Eight lower-case letters and digits, from the system's randomness (a training seed must not repeat them)."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(8))


def settle_run_id(run_dir: Path, given: str | None) -> str:
    """The id of the run: the checkpoint's, else the folder's, else a new one; written to `wandb_id.txt`."""
    path = run_dir / "wandb_id.txt"
    known = path.read_text().strip() if path.exists() else ""
    run_id = given or known or new_run_id()
    if run_id != known:
        beside = path.with_name(path.name + ".tmp")
        beside.write_text(run_id + "\n")
        beside.replace(path)
    return run_id


class WandbMirror:
    """Sends what rank 0 logs to W&B through a child process; every method returns at once except `close`.

    Args:
        run_dir: the run folder; wandb's own folder `wandb/` goes into it.
        run_name: the name shown.
        run_id: the run's id for life (see `settle_run_id`).
        config: the resolved config, shown by W&B.
        settings: see `WandbSettings`.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        run_name: str,
        run_id: str,
        config: Mapping[str, Any],
        settings: WandbSettings,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.run_id = run_id
        self.settings = settings
        self.mode = resolve_mode(settings.mode)
        self.sent = 0
        self.dropped = 0
        self.problem = ""
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._child: subprocess.Popen[bytes] | None = None
        self._hello = b""
        self._thread: threading.Thread | None = None
        if self.mode == "disabled":
            return
        hello = {
            "kind": "init", "run_dir": str(self.run_dir.resolve()), "run_name": run_name, "run_id": run_id,
            "config": dict(config), "parent": os.getpid(), **asdict(settings), "mode": self.mode,
        }  # fmt: skip
        self._hello = json.dumps(hello, default=str).encode() + b"\n"

    @property
    def active(self) -> bool:
        """Is there anything to mirror to: not disabled, and not closed."""
        return bool(self._hello)

    def start(self) -> None:
        """Start the child if it does not run yet. The first logged step does it: a run without one leaves no folder."""
        if self._thread is not None or not self.active:
            return
        try:
            self._child = self._spawn()
        except OSError as error:
            self.problem, self._hello = f"the W&B process could not start: {error}", b""
            return
        self._thread = threading.Thread(target=self._pump, name="wandb-mirror", daemon=True)
        self._thread.start()

    def _spawn(self) -> subprocess.Popen[bytes]:
        folder = self.run_dir / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        # A child inherits the signal mask: a job's signals wait until the worker ignores them, also while Python starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in JOB_SIGNALS])
        try:
            with open(folder / "mirror.log", "ab") as log:
                return subprocess.Popen(
                    [sys.executable, "-m", "k3train.tracking.wandb_worker"],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "WANDB_SILENT": "true"},
                )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queue the metrics of a step; `step` may not decrease (older ones are left out by the child, and counted)."""
        if self.active:
            self.log_line(step, encode_line(metrics))

    def log_line(self, step: int, line: bytes) -> None:
        """Queue a line of `metrics.jsonl` as it is, so that a large matrix is encoded once."""
        if self.active:
            self.start()
            self._put(b'{"kind": "log", "step": %d, "metrics": %b}\n' % (step, line.rstrip()))

    def event(self, kind: str, message: str, step: int) -> None:
        """Queue an event; it joins the next logged step."""
        if self.active:
            self._put(encode_line({"kind": "event", "step": int(step), "event": kind, "message": message}))

    def _put(self, line: bytes) -> None:
        with self._lock:
            full = self._queue.qsize() >= self.settings.queue_records
            if self.problem or full or self._waiting_bytes + len(line) > self.settings.queue_bytes:
                self.dropped += 1
                return
            self._waiting_bytes += len(line)
        self._queue.put(line)

    def _pump(self) -> None:
        assert self._child is not None and self._child.stdin is not None
        pipe = self._child.stdin
        with contextlib.suppress(OSError):  # a child that is gone already shows at the first record
            pipe.write(self._hello)
        while (line := self._queue.get()) is not None:
            if not self.problem:
                try:
                    pipe.write(line)
                    pipe.flush()
                    self.sent += 1
                except (OSError, ValueError) as error:
                    self.problem = self.problem or f"the W&B process ended early ({error}); see wandb/mirror.log"
                    self.dropped += 1
            else:
                self.dropped += 1
            with self._lock:
                self._waiting_bytes -= len(line)
        with contextlib.suppress(OSError, ValueError):
            pipe.close()  # end of input: the child finishes the run and exits

    def status(self) -> dict[str, Any]:
        """What the child last said: `mode`, `last_step`, `logged`, `skipped`, `error`, `folder`; may be empty."""
        try:
            return json.loads((self.run_dir / "wandb" / "mirror.json").read_text())
        except (OSError, ValueError):
            return {}

    def close(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Let the child finish, for `timeout_s` at most, then kill it. Returns `status()` and this side's counts."""
        if self._child is None or self._thread is None:
            self._hello = b""
            return {"mode": self.mode, "sent": 0, "dropped": self.dropped, "problem": self.problem}
        deadline = time.monotonic() + (self.settings.close_timeout_s if timeout_s is None else timeout_s)
        self._queue.put(None)
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        try:
            code = self._child.wait(max(deadline - time.monotonic(), 0.05))
            if code and not self.problem:
                self.problem = f"the W&B process ended with code {code}; see wandb/mirror.log"
        except subprocess.TimeoutExpired:
            # said before the kill, whose broken pipe would otherwise be taken for the cause
            self.problem = self.problem or "W&B did not finish in time; its files stay in wandb/ for `wandb sync`"
            self._child.kill()
            self._child.wait()
        self._child, self._hello = None, b""
        return {**self.status(), "sent": self.sent, "dropped": self.dropped, "problem": self.problem}
