"""Where this process stands among the ranks, and how ranks come to be.

Under torchrun or srun the ranks are there already and this module only reads them. Otherwise a layout of N > 1 ranks
is started here as N local processes, each given the resolved configuration in a file, never the command line.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3train.config import checks
from k3train.config.schema import Config
from k3train.errors import EnvironmentError_, K3TrainError

if TYPE_CHECKING:
    import torch.distributed as dist

EXIT_USER = 2  # a K3TrainError: the user can cure it
EXIT_FAULT = 1  # anything else
EXIT_REQUEUE = 75  # stopped on purpose before the end, with a checkpoint: run me again

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
GRACE_SECONDS = 20.0  # between SIGTERM and SIGKILL for the ranks left behind by a failed one
STRAGGLE_SECONDS = float(os.environ.get("K3TRAIN_STRAGGLE_SECONDS", "120"))  # ranks may outlive the first to end well

_ERROR_FOLDER = "K3TRAIN_ERROR_FOLDER"
_SOURCE = "K3TRAIN_LAUNCHER"
_store: dist.Store | None = None  # the rendezvous of this process, kept for init_distributed


@dataclass(frozen=True)
class Place:
    """One rank's place. source: self (one process), local (started here), torchrun, slurm or environment."""

    rank: int
    local_rank: int
    world: int
    local_world: int
    source: str

    def describe(self) -> str:
        said = {
            "self": "one process",
            "local": f"{self.world} local processes",
            "torchrun": f"{self.world} ranks from torchrun",
            "slurm": f"{self.world} ranks from Slurm job {os.environ.get('SLURM_JOB_ID', '?')}",
            "environment": f"{self.world} ranks from RANK and WORLD_SIZE",
        }
        return said[self.source]


def find_place(env: dict[str, str] | None = None) -> Place | None:
    """The place a launcher gave this process, or None where there is no launcher.

    RANK and WORLD_SIZE win (torchrun, or a script that sets them), then the task numbers of an srun step. The batch
    shell of a Slurm job is no rank: it has SLURM_PROCID but no step.
    """
    e = os.environ if env is None else env
    if "RANK" in e and "WORLD_SIZE" in e:
        rank, world = int(e["RANK"]), int(e["WORLD_SIZE"])
        source = e.get(_SOURCE) or ("torchrun" if "TORCHELASTIC_RUN_ID" in e else "environment")
        if source == "environment" and "SLURM_STEP_ID" in e:
            source = "slurm"
        return Place(rank, int(e.get("LOCAL_RANK", rank)), world, int(e.get("LOCAL_WORLD_SIZE", 1)), source)
    if "SLURM_STEP_ID" in e and int(e.get("SLURM_STEP_NUM_TASKS", e.get("SLURM_NTASKS", "1"))) > 1:
        world = int(e.get("SLURM_STEP_NUM_TASKS", e.get("SLURM_NTASKS", "1")))
        tasks = e.get("SLURM_STEP_TASKS_PER_NODE", e.get("SLURM_TASKS_PER_NODE", "1"))
        local = _tasks_of_node(tasks, int(e.get("SLURM_NODEID", "0")))
        return Place(int(e["SLURM_PROCID"]), int(e.get("SLURM_LOCALID", "0")), world, local, "slurm")
    return None


def _tasks_of_node(text: str, node: int) -> int:
    """Tasks on a node from Slurm's compressed list: "8(x2),4" is 8, 8, 4."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * (int(times.rstrip(")")) if times else 1)
    return counts[min(node, len(counts) - 1)]


def export_place(place: Place) -> None:
    """Write the place into the environment in torch's words, with a master address and port where Slurm gave none."""
    e = os.environ
    e["RANK"], e["WORLD_SIZE"] = str(place.rank), str(place.world)
    e["LOCAL_RANK"], e["LOCAL_WORLD_SIZE"] = str(place.local_rank), str(place.local_world)
    if place.source == "slurm":
        e.setdefault("MASTER_ADDR", slurm_master_address(dict(e)))
        e.setdefault("MASTER_PORT", str(slurm_port(e.get("SLURM_JOB_ID", "0"))))
    e.setdefault("MASTER_ADDR", "127.0.0.1")
    e.setdefault("MASTER_PORT", "29500")


def slurm_port(job_id: str) -> int:
    """A port that differs between jobs sharing a node: 20000 + job id modulo 10000."""
    return 20000 + int(job_id) % 10000


def slurm_master_address(env: dict[str, str]) -> str:
    """The first node of the step, without needing scontrol (containers lack it)."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "localhost"
    return first_node(nodes)


def first_node(nodes: str) -> str:
    """The first name of a Slurm node list: "n[03-05,9],x1" is n03."""
    head = nodes.split("[", 1)
    if len(head) == 1 or "," in head[0]:
        return nodes.split(",", 1)[0]
    inside, _, after = head[1].partition("]")
    return head[0] + inside.replace("-", ",").split(",", 1)[0] + after.split(",", 1)[0]


def refuse_login_node(verb: str, world: int, overrides: list[str]) -> None:
    """Refuse to start `world` processes on a Slurm login node outside an allocation. Raises EnvironmentError_."""
    e = os.environ
    inside = "SLURM_JOB_ID" in e or e.get("K3TRAIN_LOGIN_NODE") == "allow"
    conf = Path(e.get("SLURM_CONF", "/etc/slurm/slurm.conf"))
    if inside or shutil.which("sbatch") is None or not conf.is_file():
        return
    words = " ".join(overrides)
    raise EnvironmentError_(
        f"this layout needs {world} processes, and this is a Slurm machine outside an allocation. Type `k3train submit "
        f"{words + ' ' if words else ''}cluster=slurm`, or run inside salloc. (If this machine may compute: "
        f"K3TRAIN_LOGIN_NODE=allow k3train {verb} ...)"
    )


# --- configuration for the ranks that do not compose ---------------------------------------------------------------


def share_config(place: Place, make: Callable[[], Config]) -> Config:
    """Rank 0 makes the configuration; the other ranks of a launcher receive it, resolved.

    An error of rank 0 ends the others at once. Raises what `make` raises on rank 0, EnvironmentError_ elsewhere.
    """
    from k3train.config.compose import dump, parse

    store = _rendezvous(place)
    if place.rank:
        text = store.get("k3train/config").decode()
        if text.startswith("!"):
            raise EnvironmentError_(f"rank 0 could not compose the configuration: {text[1:]}")
        return parse(text, "the configuration from rank 0")
    try:
        config = make()
        store.set("k3train/config", dump(config))
        return config
    except BaseException as error:
        store.set("k3train/config", f"!{error}")
        time.sleep(1.0)  # rank 0 may host the store; let the others read
        raise


def _rendezvous(place: Place) -> dist.Store:
    global _store
    if _store is None:
        import torch.distributed as dist

        export_place(place)
        wait = datetime.timedelta(minutes=30)
        _store = next(dist.rendezvous("env://", place.rank, place.world, timeout=wait))[0]
        _store.set_timeout(wait)
    return _store


def init_distributed(config: Config) -> Place:
    """Create the default process group (gloo on CPU, NCCL with gloo beside it on GPU) and return this rank's place.

    Safe to call twice. Raises LayoutError where the ranks that exist do not fit the layout.
    """
    import torch
    import torch.distributed as dist

    place = find_place() or Place(0, 0, 1, 1, "self")
    checks.check(config, place.world)
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    if dist.is_initialized():
        return place
    store: Any = dist.HashStore() if place.world == 1 else _rendezvous(place)
    # `watchdog_seconds` is the loop's patience; the group's own limit lies above it, so that the loop reports first.
    limit = datetime.timedelta(seconds=max(600.0, 2 * config.train.watchdog_seconds))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        store=dist.PrefixStore(f"k3train/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store),
        rank=place.rank,
        world_size=place.world,
        timeout=limit,
    )
    return place


# --- local ranks ---------------------------------------------------------------------------------------------------


def run_local(verb: str, config: Config, world: int) -> int:
    """Run `verb` in `world` local processes and return the exit code of the whole.

    Signals are forwarded to every rank. When a rank fails, its error is printed first, and the others are ended
    within GRACE_SECONDS. Ranks above 0 write what they print to RUN FOLDER/logs/rankN.log.
    """
    from k3train.config.compose import save_resolved

    logs = Path(config.run.dir) / config.run.name / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="k3train-") as folder:
        save_resolved(config, Path(folder) / "config.yaml")
        ranks = _start(verb, world, Path(folder), logs)
        with _forwarding(ranks):
            failed = _wait(ranks)
            if failed is None:
                return _agreed_code(ranks)
            print(_first_error(failed, ranks[failed].returncode, Path(folder), logs), file=sys.stderr, flush=True)
            _end(ranks)
        code = ranks[failed].returncode
        return code if code > 0 else 128 - code


def run_child(verb: str, config: Config) -> int:
    """Run `verb` in one fresh process and return its exit code; for sweeps, whose jobs must not see each other."""
    from k3train.config.compose import save_resolved

    with tempfile.TemporaryDirectory(prefix="k3train-") as folder:
        file = Path(folder) / "config.yaml"
        save_resolved(config, file)
        child = subprocess.Popen([sys.executable, "-m", "k3train.launch", verb, str(file)], start_new_session=True)
        with _forwarding([child]):
            code = child.wait()
    return code if code >= 0 else 128 - code


def free_port() -> int:
    """A port for ranks to meet at: free now, and below those that the system gives to connections by itself.

    Ranks take seconds to start, in which a port from that range may go to anybody; gloo alone takes hundreds.
    """
    while True:
        port = 30000 + int.from_bytes(os.urandom(4)) % 2700  # above slurm_port
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _start(verb: str, world: int, folder: Path, logs: Path) -> list[subprocess.Popen[bytes]]:
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        _SOURCE: "local",
        _ERROR_FOLDER: str(folder),
    }
    shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    ranks = []
    for rank in range(world):
        output: Any = None
        if rank:
            output = (logs / f"rank{rank}.log").open("ab")
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "k3train.launch", verb, str(folder / "config.yaml")],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if rank else None,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which forwards it once
            )
        )
        if rank:
            output.close()
    return ranks


@contextlib.contextmanager
def _forwarding(ranks: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Pass the signals of a scheduler or a terminal on to every rank."""

    def forward(number: int, _frame: Any) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                if rank.poll() is None:
                    rank.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all ranks end well (None) or one fails (its index; one killed by a signal before one that raised).

    A rank that lives on long after another has ended hangs, or was stopped: it is ended.
    """
    first_end: float | None = None
    while True:
        codes = [rank.poll() for rank in ranks]
        bad = [i for i, code in enumerate(codes) if code not in (None, 0, EXIT_REQUEUE)]
        if bad:
            time.sleep(0.2)  # others may be ending of the same cause: see them before naming the first
            codes = [rank.poll() for rank in ranks]
            bad = [i for i, code in enumerate(codes) if code not in (None, 0, EXIT_REQUEUE)]
            return min(bad, key=lambda i: ((codes[i] or 0) > 0, i))
        if all(code is not None for code in codes):
            return None
        if first_end is None and any(code is not None for code in codes):
            first_end = time.monotonic()
        if first_end is not None and time.monotonic() - first_end > STRAGGLE_SECONDS:
            alive = ", ".join(str(i) for i, code in enumerate(codes) if code is None)
            print(f"k3train: rank {alive} did not end with the others and is being ended", file=sys.stderr, flush=True)
            _end(ranks)
            return None
        time.sleep(0.05)


def _agreed_code(ranks: list[subprocess.Popen[bytes]]) -> int:
    return EXIT_REQUEUE if any(rank.returncode == EXIT_REQUEUE for rank in ranks) else 0


def _first_error(index: int, code: int, folder: Path, logs: Path) -> str:
    """What to tell: the error written first, or the signal that ended a rank."""
    written = sorted(folder.glob("rank*.error"), key=lambda f: f.stat().st_mtime_ns)
    if code < 0:
        name = signal.Signals(-code).name
        return f"k3train: rank {index} was ended by {name}; the others are being ended. Logs: {logs}"
    if written:
        rank = written[0].stem.removeprefix("rank")
        text = written[0].read_text().rstrip()
        return f"k3train: rank {rank} failed first; the others are being ended.\n{text}"
    return f"k3train: rank {index} ended with code {code} and no word; the others are being ended. Logs: {logs}"


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    until = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < until and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()


def report(verb: str, call: Callable[[], int | None]) -> int:
    """Run a verb and turn its outcome into an exit code; a user's error is a sentence, a fault a traceback."""
    try:
        return int(call() or 0)
    except K3TrainError as error:
        _tell(f"k3train {verb}: {error}")
        return EXIT_USER
    except KeyboardInterrupt:
        _tell(f"k3train {verb}: interrupted")
        return 130
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM) or error.filename is None:
            _tell(traceback.format_exc().rstrip())
            return EXIT_FAULT
        why = "allow reading and writing there, or name another place"
        _tell(f"k3train {verb}: {error.filename} cannot be used ({error.strerror}); {why}")
        return EXIT_USER
    except BaseException:
        _tell(traceback.format_exc().rstrip())
        return EXIT_FAULT


def leave_code(code: int) -> int:
    """Note the outcome where a batch script looks for it ($K3TRAIN_EXIT_FILE), and return this process's exit code.

    srun and torchrun end the other ranks when one exits with a code other than 0. So after a planned stop every rank
    exits with 0 and the file tells of it; without a file rank 0 alone says EXIT_REQUEUE, under srun (torchrun would
    call it a failure).
    """
    place = find_place()
    file = os.environ.get("K3TRAIN_EXIT_FILE")
    if file and (place is None or place.rank == 0):
        with contextlib.suppress(OSError):
            Path(file).write_text(f"{code}\n")
    if code == EXIT_REQUEUE and place is not None and place.world > 1 and place.source in ("slurm", "torchrun"):
        return code if place.rank == 0 and place.source == "slurm" and not file else 0
    return code


def _tell(text: str) -> None:
    """To stderr; a local rank leaves it to the launcher, which prints the first rank's alone."""
    folder = os.environ.get(_ERROR_FOLDER)
    if folder and Path(folder).is_dir():
        beside = Path(folder) / f".rank{os.environ['RANK']}"
        beside.write_text(text)
        beside.rename(Path(folder) / f"rank{os.environ['RANK']}.error")
        if os.environ["RANK"] == "0":
            return
    print(text, file=sys.stderr, flush=True)


def _die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the launcher is killed, so that no rank is left behind (Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, int(signal.SIGTERM))


def main(words: list[str] | None = None) -> int:
    """One self-launched rank: `python -m k3train.launch VERB CONFIG.yaml`."""
    verb, file = words if words is not None else sys.argv[1:]
    from k3train import signals, verbs

    if verbs.VERBS[verb].ranks:
        signals.listen()  # before the slow imports: a stop request during start-up is kept
    _die_with_parent()
    from k3train.config.compose import load_resolved

    return report(verb, lambda: verbs.call(verb, load_resolved(file)))


if __name__ == "__main__":
    code = main()
    from k3train import signals

    if signals.listening():
        signals.ignore()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # a failed rank must not wait in the exit handlers of libraries for ranks that are gone
    sys.exit(code)
