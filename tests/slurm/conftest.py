"""A real Slurm of two nodes on this machine: slurmctld and two slurmd, without systemd, munge or cgroups."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

FAKE = Path(__file__).parents[1] / "cli/fake"

CONF = """
ClusterName=test
FirstJobId={job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
# a requeued job waits for its old credential to expire: 120 s by default
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
# two nodes claim more processors than the machine has
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=sched_min_interval=0,bf_interval=1,sched_interval=1,requeue_delay=1,max_switch_wait=0
KillWait=20
MinJobAge=600
SlurmdTimeout=300
JobRequeue=1
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=2000 State=UNKNOWN
PartitionName=test Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


class MiniSlurm:
    """start, stop, and what tests ask of it. Commands run with SLURM_CONF pointing here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"

    def start(self) -> None:
        port = 17000 + os.getpid() % 2000 * 5
        host = socket.gethostname().split(".")[0]
        for name in ("state", "spool.n1", "spool.n2"):
            (self.folder / name).mkdir(parents=True)
        user = subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
        self.conf.write_text(
            CONF.format(
                host=host,
                port=port,
                job=1 + os.getpid() % 9000,
                first=port + 1,
                last=port + 2,
                user=user,
                folder=self.folder,
            )
        )
        subprocess.run(["slurmctld", "-c", "-f", str(self.conf)], check=True, env=self.environment())
        for node in ("n1", "n2"):
            subprocess.run(["slurmd", "-f", str(self.conf), "-N", node], check=True, env=self.environment())
        self.wait(lambda: self.out("sinfo", "-h", "-o", "%t:%D").strip() == "idle:2", 60, "two idle nodes")

    def stop(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.out("scancel", "--me")
        time.sleep(1.0)
        for file in self.folder.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), 15)

    def environment(self, **extra: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK", "WORLD_SIZE", "MASTER_"))}
        path = f"{Path(sys.executable).parent}:{clean['PATH']}"
        return {**clean, "PATH": path, "SLURM_CONF": str(self.conf), "OMP_NUM_THREADS": "1", **extra}

    def out(self, *words: str) -> str:
        return subprocess.run(words, env=self.environment(), capture_output=True, text=True, timeout=60).stdout

    def wait(self, true, seconds: float, what: str) -> None:  # noqa: ANN001
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if true():
                return
            time.sleep(0.2)
        pytest.fail(f"waited {seconds:.0f} s for {what}: {self.out('scontrol', 'show', 'job')}")

    def job(self, number: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S+)", self.out("scontrol", "show", "job", "-o", number)))

    def state(self, number: str) -> str:
        return self.job(number).get("JobState", "GONE")

    def ends(self, number: str, seconds: float = 400) -> str:
        """The final state: one that holds, since a job on its way to a requeue passes through others."""
        busy = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "STOPPED")
        final: list[str] = []

        def settled() -> bool:
            now = self.state(number)
            final[:] = [*final, now] if now not in busy and (not final or final[-1] == now) else []
            return len(final) > 15

        self.wait(settled, seconds, f"job {number} to end")
        return final[-1]


class Desk:
    """A scratch folder in which a user submits jobs whose training is a stand-in, or the real one."""

    def __init__(self, slurm: MiniSlurm, folder: Path) -> None:
        self.slurm, self.folder, self.seen = slurm, folder, folder / "seen"
        self.seen.mkdir()

    def environment(self, do: str | None) -> dict[str, str]:
        fake = {"PYTHONPATH": str(FAKE), "FAKE_OUT": str(self.seen), "FAKE_DO": do} if do is not None else {}
        return self.slurm.environment(**fake)

    def k3train(self, *words: str, do: str | None = "run:20:0.1") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "k3train.cli", *words], cwd=self.folder, env=self.environment(do),
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    def submit(self, *overrides: str, do: str | None = "run:20:0.1") -> str:
        done = self.k3train("submit", "cluster=slurm_cpu", "train.micro_batch=1", *overrides, do=do)
        assert done.returncode == 0, done.stdout + done.stderr
        return re.findall(r"submitted job (\d+)", done.stdout)[-1]

    def steps(self, run: str = "k3_tiny", rank: int = 0) -> list[int]:
        file = self.folder / f"runs/{run}/steps.{rank}"
        return [int(line) for line in file.read_text().split()] if file.is_file() else []

    def log(self, run: str = "k3_tiny") -> str:
        return "".join(f.read_text() for f in sorted((self.folder / f"runs/{run}/logs").glob("slurm-*.out")))


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniSlurm]:
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        pytest.skip("no slurmctld here: apt-get install slurmctld slurmd slurm-client")
    cluster = MiniSlurm(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def desk(slurm: MiniSlurm, tmp_path: Path) -> Desk:
    return Desk(slurm, tmp_path)
