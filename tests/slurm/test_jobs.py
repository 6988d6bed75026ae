"""Jobs on a real Slurm of two nodes: start, stop, requeue, chain, array, giving up. Training is a stand-in."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from .conftest import Desk

pytestmark = pytest.mark.ops

LONG = "run:60:0.5"


def test_a_job_runs_on_two_nodes(desk: Desk) -> None:
    job = desk.submit(do="run:3:0.1")
    assert desk.slurm.ends(job) == "COMPLETED", desk.log()
    seen = sorted((json.loads(f.read_text()) for f in desk.seen.glob("*.json")), key=lambda s: s["rank"])
    assert [(s["rank"], s["world"], s["node"]) for s in seen] == [(0, 2, "n1"), (1, 2, "n2")]
    assert "2 ranks from Slurm job" in desk.log() and "ended with code 0" in desk.log()


@pytest.mark.parametrize(
    "stop",
    [["scancel", "-s", "USR1"], ["scancel", "-b", "-s", "USR1"], ["scontrol", "requeue"]],
    ids=["USR1 to the ranks", "USR1 to the batch shell", "an operator's requeue"],
)
def test_a_stopped_job_is_requeued_and_goes_on_at_the_next_step(desk: Desk, stop: list[str]) -> None:
    job = desk.submit(do=LONG)
    desk.slurm.wait(lambda: len(desk.steps()) > 5, 300, "the first steps")
    desk.slurm.out(*stop, job)
    desk.slurm.wait(lambda: desk.slurm.job(job).get("Restarts") == "1", 300, "the requeue")
    assert desk.slurm.ends(job, 240) == "COMPLETED", desk.log()
    assert desk.steps() == list(range(1, 61))
    assert len(list((desk.folder / "runs/k3_tiny/logs").glob("slurm-*.out"))) == 1


def test_a_job_at_its_time_limit_saves_and_is_requeued(desk: Desk) -> None:
    job = desk.submit("cluster.time='00:02:00'", "cluster.signal_lead=60", do="run:150:0.5")
    assert desk.slurm.ends(job, 900) == "COMPLETED", desk.log()
    assert int(desk.slurm.job(job)["Restarts"]) >= 1
    assert desk.steps() == list(range(1, 151))


def test_a_signal_during_start_up_is_not_lost(desk: Desk) -> None:
    job = desk.submit(do="run:40:0.5")
    desk.slurm.wait(lambda: (desk.folder / "runs/k3_tiny/logs").is_dir() and "start 0" in desk.log(), 60, "the job")
    desk.slurm.out("scancel", "-b", "-s", "USR1", job)
    desk.slurm.wait(lambda: desk.slurm.job(job).get("Restarts") == "1", 300, "the requeue")
    assert desk.slurm.ends(job) == "COMPLETED", desk.log()
    assert desk.steps() == list(range(1, 41))


def test_a_cancelled_job_saves_and_stays_cancelled(desk: Desk) -> None:
    job = desk.submit(do=LONG)
    desk.slurm.wait(lambda: len(desk.steps()) > 3, 300, "the first steps")
    desk.slurm.out("scancel", job)
    assert desk.slurm.ends(job, 120) == "CANCELLED"
    assert desk.slurm.job(job)["Restarts"] == "0"
    saved = [p.name for p in (desk.folder / "runs/k3_tiny/checkpoints").iterdir()]
    assert saved == [f"step-{desk.steps()[-1]:08d}"]


def test_a_job_that_fails_without_progress_gives_up(desk: Desk) -> None:
    job = desk.submit("cluster.max_restarts=2", do="fault@1")
    assert desk.slurm.ends(job, 300) == "FAILED"
    assert desk.log().count("RuntimeError: something broke inside") == 3
    assert "giving up: 2 restarts without a new checkpoint" in desk.log()


def test_a_mistake_is_not_retried(desk: Desk) -> None:
    job = desk.submit(do="user_error")
    assert desk.slurm.ends(job, 120) == "FAILED"
    assert desk.log().count("the corpus is a teapot") == 2 and desk.slurm.job(job)["Restarts"] == "0"


def test_a_chain_goes_on_without_requeue_and_cancels_what_is_left(desk: Desk) -> None:
    last = desk.submit("cluster.requeue=false", "cluster.chain=3", do=LONG)
    first, second = str(int(last) - 2), str(int(last) - 1)
    desk.slurm.wait(lambda: len(desk.steps()) > 3, 300, "the first steps")
    desk.slurm.out("scancel", "-s", "USR1", first)
    assert desk.slurm.ends(first, 120) == "FAILED"  # code 75: the next of the chain goes on
    assert desk.slurm.ends(second, 240) == "COMPLETED", desk.log()
    assert desk.slurm.ends(last, 60) == "CANCELLED"
    assert desk.steps() == list(range(1, 61))


def test_the_array_script_runs_each_arm_in_its_own_folder(desk: Desk) -> None:
    script = Path(__file__).parents[2] / "slurm/ablation_array.sbatch"
    text = re.sub(r"#SBATCH --(gpus-per-node|cpus-per-task).*\n", "", script.read_text())
    (desk.folder / "array.sbatch").write_text(text)
    done = subprocess.run(
        ["sbatch", "--parsable", "--array=0-1", "array.sbatch"], cwd=desk.folder, env=desk.environment("run:3:0.1"),
        capture_output=True, text=True,
    )  # fmt: skip
    job = done.stdout.strip()
    for task in ("0", "1"):
        assert desk.slurm.ends(f"{job}_{task}") == "COMPLETED"
    assert {s.name.removesuffix(".0.json") for s in desk.seen.glob("*.json")} == {
        "ablation-model.kda.decay_bound=-5",
        "ablation-model.kda.decay_bound=null",
    }


def test_a_sweep_through_submitit(desk: Desk) -> None:
    pytest.importorskip("submitit")
    done = desk.k3train(
        "train", "-m", "hydra/launcher=submitit_slurm", "hydra.launcher.mem_gb=null", "hydra.launcher.partition=test",
        "hydra.launcher.timeout_min=5", "model.kda.decay_bound=-5,null", do="run:3:0.1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert {s.name for s in desk.seen.glob("*.json")} == {
        "k3_tiny-model.kda.decay_bound=-5.0.json",
        "k3_tiny-model.kda.decay_bound=null.0.json",
    }


def test_a_login_node_is_told_to_submit(desk: Desk) -> None:
    done = desk.k3train("train", "parallel.data=2", "train.micro_batch=1")
    assert done.returncode == 2
    assert "k3train submit parallel.data=2 train.micro_batch=1 cluster=slurm" in done.stderr
