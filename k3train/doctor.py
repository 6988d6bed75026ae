"""`k3train doctor`: look at the machine, name each problem with its cure, then train a few steps to prove it works."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from k3train.errors import K3TrainError

GOOD, NOTE, BAD = "ok", "note", "PROBLEM"

OPTIONAL = {
    "transformer-engine": "faster linears, norms and attention on GPUs; without it the torch backend runs there",
    "deepspeed": "engine=deepspeed; uv sync --extra deepspeed",
    "submitit": "sweeps through Hydra's Slurm launcher; uv sync --extra slurm",
    "wandb-workspaces": "k3train track workspace; uv sync --extra workspace",
}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. cure: what to do, where the state is not ok."""

    state: str
    subject: str
    text: str
    cure: str = ""

    def show(self) -> str:
        lines = [f"{self.state:<8} {self.subject:<12} {self.text}"]
        return "\n".join(lines + ([f"{'':<21} -> {self.cure}"] if self.cure else []))


def doctor(words: list[str]) -> int:
    """`k3train doctor [--no-self-test]`: print findings; 1 where there is a problem."""
    parser = argparse.ArgumentParser(prog="k3train doctor", description=__doc__)
    parser.add_argument("--no-self-test", action="store_true", help="only look, train nothing")
    args = parser.parse_args(words)
    problems = 0
    for look in [*LOOKS, *([] if args.no_self_test else [self_test])]:
        for finding in _guarded(look):
            print(finding.show(), flush=True)
            problems += finding.state == BAD
    print(f"\n{problems} problem{'s' if problems != 1 else ''}" if problems else "\nno problem found")
    return int(problems > 0)


def _guarded(look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A look that breaks is itself a finding."""
    try:
        yield from look()
    except Exception as error:
        yield Finding(
            BAD, look.__name__.strip("_"), f"{type(error).__name__}: {error}", "reinstall k3train, or report this"
        )


def requirements() -> dict[str, str]:
    """Package -> version condition, from the installed k3train itself."""
    wanted = {}
    for line in importlib.metadata.requires("k3train") or []:
        match = re.match(r"([A-Za-z0-9_.-]+)([^;]*)", line)
        if match and "extra ==" not in line:
            wanted[match[1]] = match[2].strip()
    return wanted


def versions() -> Iterator[Finding]:
    """Python, the required packages at their pins, the optional ones."""
    from packaging.specifiers import SpecifierSet

    python = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] == (3, 12):
        yield Finding(GOOD, "python", python)
    else:
        yield Finding(BAD, "python", f"{python}, and 3.12 is needed", "use ./run, which sets Python 3.12 up")
    right = []
    for name, condition in requirements().items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(BAD, "packages", f"{name} is missing", f"uv sync, or pip install '{name}{condition}'")
            continue
        if SpecifierSet(condition).contains(found, prereleases=True):
            right.append(f"{name} {found}")
        else:
            yield Finding(
                BAD, "packages", f"{name} {found}, and {condition} is needed", f"pip install '{name}{condition}'"
            )
    yield Finding(GOOD, "packages", ", ".join(right))
    for name, use in OPTIONAL.items():
        try:
            yield Finding(GOOD, "optional", f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding(NOTE, "optional", f"{name} is not installed", use)


def gpus() -> Iterator[Finding]:
    """What torch sees, NCCL, peer access, Triton's needs."""
    import torch

    driver = Path("/proc/driver/nvidia/version").is_file() or shutil.which("nvidia-smi") is not None
    if not torch.cuda.is_available():
        if driver:
            yield Finding(
                BAD, "GPU", f"a driver is here, but torch {torch.__version__} sees no GPU",
                "look at nvidia-smi and CUDA_VISIBLE_DEVICES; the driver must be new enough for CUDA "
                f"{torch.version.cuda}",
            )  # fmt: skip
        else:
            yield Finding(GOOD, "GPU", f"none: CPU ranks over gloo, {len(os.sched_getaffinity(0))} cores")
        return
    count = torch.cuda.device_count()
    for i in range(count):
        free, total = torch.cuda.mem_get_info(i)
        major, minor = torch.cuda.get_device_capability(i)
        text = f"{i}: {torch.cuda.get_device_name(i)}, {total / 1e9:.0f} GB, compute {major}.{minor}"
        if major < 8:
            yield Finding(BAD, "GPU", text, "bf16 kernels need compute capability 8.0 or above")
        elif free < 0.9 * total:
            yield Finding(
                NOTE, "GPU", f"{text}, {free / 1e9:.0f} GB free", "another process uses it: nvidia-smi shows which"
            )
        else:
            yield Finding(GOOD, "GPU", text)
    yield Finding(GOOD, "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    blind = [
        (i, j) for i in range(count) for j in range(count) if i != j and not torch.cuda.can_device_access_peer(i, j)
    ]
    if blind:
        yield Finding(NOTE, "NCCL", f"{len(blind)} GPU pairs without peer access", "slower; do not bind GPUs to tasks")
    if importlib.util.find_spec("triton") is None:
        yield Finding(BAD, "Triton", "not installed", "pip install triton (the version torch asks for)")
    elif not any(shutil.which(c) for c in ("gcc", "cc", "clang")):
        yield Finding(BAD, "Triton", "no C compiler for its launchers", "apt-get install gcc, or set CC")
    else:
        yield Finding(GOOD, "Triton", importlib.metadata.version("triton"))


def environment() -> Iterator[Finding]:
    """Variables and limits that break or slow runs."""
    if os.environ.get("NVTE_CUTEDSL_FUSED_GROUPED_MLP"):
        yield Finding(
            BAD, "environment", "NVTE_CUTEDSL_FUSED_GROUPED_MLP is set: it would replace SiTU by SwiGLU",
            "unset NVTE_CUTEDSL_FUSED_GROUPED_MLP",
        )  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        yield Finding(NOTE, "environment", f"{soft} open files allowed", f"ulimit -n {min(hard, 65536)}")
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    if shared < 1 << 28:
        yield Finding(NOTE, "environment", f"/dev/shm holds {shared / 1e6:.0f} MB", "docker run --shm-size=8g")
    yield Finding(GOOD, "environment", f"{soft} open files, {shared / 1e9:.1f} GB of shared memory")


def disk() -> Iterator[Finding]:
    """Room and permission where runs and caches go."""
    cache = Path(os.environ.get("K3TRAIN_CACHE", "~/.cache/k3train")).expanduser()
    for name, folder in (("runs", Path("runs").absolute()), ("cache", cache)):
        there = next(p for p in (folder, *folder.parents) if p.is_dir())
        free = shutil.disk_usage(there).free
        cure = "run elsewhere, or run.dir=FOLDER" if name == "runs" else "export K3TRAIN_CACHE=FOLDER"
        if not os.access(there, os.W_OK):
            yield Finding(BAD, "disk", f"{folder} cannot be written", cure)
        elif free < 2e9:
            yield Finding(BAD, "disk", f"{folder}: {free / 1e9:.1f} GB free", f"free some space; {cure}")
        else:
            yield Finding(GOOD, "disk", f"{folder}: {free / 1e9:,.0f} GB free")


def tracking() -> Iterator[Finding]:
    """Whether W&B will be online; offline is no problem."""
    from k3train.tracking.wandb import has_api_key

    mode = os.environ.get("WANDB_MODE", "")
    if mode in ("offline", "disabled"):
        yield Finding(GOOD, "W&B", f"WANDB_MODE={mode}")
    elif has_api_key():
        yield Finding(GOOD, "W&B", "a key is set: runs go online, and are kept offline where that fails")
    else:
        yield Finding(NOTE, "W&B", "no key: runs are kept offline", "wandb login, or later: k3train track replay RUN")


def slurm() -> Iterator[Finding]:
    """Whether jobs can be submitted, and whether this is already a job."""
    if "SLURM_JOB_ID" in os.environ:
        yield Finding(GOOD, "Slurm", f"inside job {os.environ['SLURM_JOB_ID']}")
    elif shutil.which("sbatch") is None:
        yield Finding(GOOD, "Slurm", "none on this machine")
    else:
        try:
            done = subprocess.run(["sinfo", "-h", "-o", "%P %a %D"], capture_output=True, text=True, timeout=10)
        except subprocess.TimeoutExpired:
            yield Finding(BAD, "Slurm", "sinfo does not answer", "is slurmctld up? scontrol ping")
            return
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["sinfo failed"])[-1]
            yield Finding(
                NOTE, "Slurm", f"installed, but {reason}", "set SLURM_CONF, or ask for the cluster's slurm.conf"
            )
        else:
            yield Finding(GOOD, "Slurm", "partitions: " + ", ".join(done.stdout.split("\n")[:8]).strip(", "))


def configuration() -> Iterator[Finding]:
    """The shipped configuration composes."""
    from k3train.config.compose import compose, conf_dir

    try:
        compose([])
        yield Finding(GOOD, "conf", str(conf_dir()))
    except K3TrainError as error:
        yield Finding(BAD, "conf", str(error), "undo the change in conf/, or reinstall k3train")


LOOKS: list[Callable[[], Iterator[Finding]]] = [
    versions, gpus, environment, disk, tracking, slurm, configuration,
]  # fmt: skip


def self_test() -> Iterator[Finding]:
    """Train the smallest thing that uses everything: one rank, then two; each must end well with falling loss."""
    import json

    for name, extra in (("one rank", []), ("two ranks", ["parallel.data=2", "train.micro_batch=2"])):
        if name == "two ranks" and _gpu_count() == 1:
            continue
        with tempfile.TemporaryDirectory(prefix="k3train-doctor-") as folder:
            begun = time.monotonic()
            command = [sys.executable, "-m", "k3train.cli", "train", "experiment=smoke", "tracking=disabled",
                       f"run.dir={folder}", *extra]  # fmt: skip
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=300,
                    env={**os.environ, "K3TRAIN_LOGIN_NODE": "allow"},
                )
            except subprocess.TimeoutExpired:
                yield Finding(BAD, "self-test", f"{name}: not done after 300 s", "is the machine very busy? try again")
                continue
            seconds = time.monotonic() - begun
            if done.returncode:
                said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-8:]
                yield Finding(
                    BAD, "self-test", f"{name}: exit code {done.returncode}", "\n    ".join(["it said:", *said])
                )
                continue
            lines = (Path(folder) / "smoke/metrics.jsonl").read_text().splitlines()
            losses = [r["train/loss"] for r in map(json.loads, lines) if "train/loss" in r]
            if len(losses) < 2 or not losses[-1] < losses[0]:
                yield Finding(BAD, "self-test", f"{name}: the loss did not fall: {losses}", "report this")
            else:
                yield Finding(
                    GOOD,
                    "self-test",
                    f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps, {seconds:.0f} s",
                )


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
