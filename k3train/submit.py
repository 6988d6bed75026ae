"""`k3train submit`: an sbatch script from slurm/train.sbatch.in and the configuration, shown, then submitted."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from k3train.config import checks
from k3train.config.schema import Config
from k3train.errors import ConfigError, EnvironmentError_

DEFAULT_LEAD = 120  # seconds of warning before the time limit while no save has been measured


@dataclass(frozen=True)
class Request:
    """What was typed after `k3train submit`: a configuration for each job, with the words that made it."""

    jobs: list[tuple[Config, list[str]]]
    dry_run: bool = False


def submit(request: Request) -> int:
    """Render and show the script of each job; hand it to sbatch unless it is a dry run. Raises EnvironmentError_."""
    for config, overrides in request.jobs:
        text = render(config, overrides)
        folder = Path(config.run.dir) / config.run.name
        print(text, end="")
        if request.dry_run:
            continue
        if shutil.which("sbatch") is None:
            raise EnvironmentError_(
                "sbatch is not on this machine; run submit on a Slurm login node, or add --dry-run and carry the script"
            )
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        script = folder / "job.sbatch"
        script.write_text(text)
        for _ in range(1 if config.cluster.requeue else config.cluster.chain):
            done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
            if done.returncode:
                raise EnvironmentError_(f"sbatch refused {script}: {done.stderr.strip()}")
            print(f"submitted job {done.stdout.strip().split(';')[0]}: {script}; log {folder}/logs/slurm-JOB.out")
    return 0


def render(config: Config, overrides: list[str]) -> str:
    """The sbatch script of one run. Raises ConfigError or LayoutError where the cluster and the layout disagree."""
    c = config.cluster
    if c.name == "local":
        raise ConfigError("cluster=local is this machine; type cluster=slurm (conf/cluster holds the clusters)")
    checks.check(config, ranks(config))
    folder = (Path(config.run.dir) / config.run.name).absolute()
    lead = signal_lead(config)
    again = 'scontrol requeue "$SLURM_JOB_ID" || exit "$code"'
    values = {
        "DIRECTIVES": "\n".join(f"#SBATCH {line}" for line in directives(config, lead)),
        "RUN_DIR": shlex.quote(str(folder)),
        "SETUP": "\n".join(c.setup),
        "THREADS": str(c.cpus_per_task),
        "LEAD": str(lead),
        "LAUNCH": launch_line(config, overrides),
        "MAX_RESTARTS": str(c.max_restarts),
        # in a chain the next job of the same name goes on, or is taken away when there is nothing left to do
        "DONE": "exit 0" if c.requeue else 'scancel --state=PENDING --name="$SLURM_JOB_NAME" --me; exit 0',
        "GIVE_UP": "" if c.requeue else 'scancel --state=PENDING --name="$SLURM_JOB_NAME" --me',
        "AGAIN": again if c.requeue else 'exit "$code"',
    }
    text = template().read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def template() -> Path:
    """The template: inside the package in a wheel, in slurm/ in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "slurm", package.parent / "slurm"):
        if (folder / "train.sbatch.in").is_file():
            return folder / "train.sbatch.in"
    raise EnvironmentError_(f"slurm/train.sbatch.in is neither in {package} nor beside it; reinstall k3train")


def ranks(config: Config) -> int:
    """Ranks of the job: nodes times ranks a node."""
    return config.cluster.nodes * ranks_per_node(config)


def ranks_per_node(config: Config) -> int:
    return config.cluster.ranks_per_node or config.cluster.gpus_per_node or 1


def directives(config: Config, lead: int) -> list[str]:
    """The options after #SBATCH."""
    c = config.cluster
    folder = (Path(config.run.dir) / config.run.name).absolute()
    lines = [
        f"--job-name={config.run.name}",
        f"--chdir={Path.cwd()}",
        f"--nodes={c.nodes}",
        f"--ntasks-per-node={ranks_per_node(config) if c.launcher == 'srun' else 1}",
        f"--cpus-per-task={c.cpus_per_task * (1 if c.launcher == 'srun' else ranks_per_node(config))}",
        f"--time={c.time}",
        f"--signal=B:USR1@{lead}",
        "--open-mode=append",
        f"--output={folder}/logs/slurm-%j.out",
        "--requeue" if c.requeue else "--no-requeue",
    ]
    if c.gpus_per_node:
        lines.append(f"--gpus-per-node={c.gpus_per_node}")  # all of them visible to every rank: peer access needs that
    for name in ("partition", "account", "qos", "mem"):
        value = getattr(c, name)
        if value is not None:
            lines.append(f"--{name}={value}")
    if not c.requeue:
        lines.append("--dependency=singleton")
    return lines + list(c.extra)


def launch_line(config: Config, overrides: list[str]) -> str:
    """The srun command of the step."""
    c = config.cluster
    srun = ["srun", "--kill-on-bad-exit=1", "--export=ALL"]
    if c.gpus_per_node:
        srun.append("--cpu-bind=cores")
    if c.container_runtime == "pyxis":
        srun += [f"--container-image={_image(config)}", '--container-mounts="$PWD:$PWD"', '--container-workdir="$PWD"']
    inside = (
        ["apptainer", "exec", "--nv", "--bind", '"$PWD:$PWD"', _image(config)]
        if c.container_runtime == "apptainer"
        else []
    )
    python = "python" if c.container_runtime != "none" else shlex.quote(sys.executable)
    words = " ".join(shlex.quote(o) for o in overrides)
    # a rank that has not yet installed its handler must not die of USR1
    guard = 'bash -c \'trap "" USR1; exec "$@"\' k3train'
    if c.launcher == "torchrun":
        torchrun = (
            f"{python} -m torch.distributed.run --nnodes={c.nodes} --nproc-per-node={ranks_per_node(config)} "
            '--node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" -m k3train.cli'
        )
        # the node's number is known inside the step alone
        guard = 'bash -c \'trap "" USR1; exec ' + torchrun.replace("'", "'\\''") + ' "$@"\' k3train'
        return " ".join([*srun, *inside, guard, "train", words]).rstrip()
    return " ".join([*srun, *inside, guard, python, "-m k3train.cli train", words]).rstrip()


def _image(config: Config) -> str:
    if config.cluster.container is None:
        raise ConfigError(
            f"cluster.container_runtime={config.cluster.container_runtime} needs an image; type cluster.container=IMAGE"
        )
    return shlex.quote(config.cluster.container)


def signal_lead(config: Config) -> int:
    """Seconds of warning: cluster.signal_lead, else three times the slowest measured save, two steps and 30 more."""
    if config.cluster.signal_lead is not None:
        return config.cluster.signal_lead
    saves, steps = measured(Path(config.run.dir) / config.run.name / "metrics.jsonl")
    if not saves:
        return DEFAULT_LEAD
    return math.ceil(3 * max(saves) + 2 * max(steps, default=0.0) + 30)


def measured(metrics: Path) -> tuple[list[float], list[float]]:
    """Seconds of saves and of steps that a run's metrics.jsonl tells of; both empty for a new run."""
    saves: list[float] = []
    steps: list[float] = []
    if metrics.is_file():
        for line in metrics.read_text(errors="replace").splitlines()[-2000:]:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # a torn last line
            for key, found in (("checkpoint/save_seconds", saves), ("train/step_seconds", steps)):
                value = record.get(key) if isinstance(record, dict) else None
                if isinstance(value, int | float):
                    found.append(float(value))
    return saves, steps
