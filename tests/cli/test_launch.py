"""Ranks started here: they get the configuration, fail with the first error on top, and obey signals."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from k3train import launch
from k3train.config.compose import compose
from k3train.errors import EnvironmentError_
from k3train.launch import free_port

pytestmark = pytest.mark.ops  # kills, signals and launches of several processes

TWO = ["parallel.data=2", "train.micro_batch=1"]


def test_one_rank_runs_in_the_process_itself(fake: Any) -> None:
    done = fake.run("train", "model.kda.decay_bound=null")
    assert done.returncode == 0, done.stderr
    (only,) = fake.seen()
    assert (only["world"], only["bound"], "local processes" in done.stdout) == (1, None, False)


def test_a_layout_of_two_ranks_starts_two_processes_with_the_resolved_configuration(fake: Any) -> None:
    done = fake.run("train", *TWO, "model.kda.decay_bound=-4")
    assert done.returncode == 0, done.stderr
    seen = fake.seen()
    assert [(s["rank"], s["world"], s["bound"]) for s in seen] == [(0, 2, -4.0), (1, 2, -4.0)]
    assert len({s["pid"] for s in seen}) == 2
    assert all(s["argv"][0] == "train" and s["argv"][1].endswith("config.yaml") and len(s["argv"]) == 2 for s in seen)
    assert "2 local processes" in done.stdout
    assert "hello from rank 0" in done.stdout and "hello from rank 1" not in done.stdout
    assert fake.files() == {"runs/k3_tiny/logs/rank1.log"}
    assert "hello from rank 1" in (fake.folder / "runs/k3_tiny/logs/rank1.log").read_text()


@pytest.mark.parametrize(
    ("orders", "code", "message"),
    [
        (
            "user_error@1 hang@0",
            2,
            "rank 1 failed first; the others are being ended.\nk3train train: the corpus is a teapot",
        ),
        ("fault@1 late_fault@0", 1, "something broke inside"),
        ("kill@1 hang@0", 137, "rank 1 was ended by SIGKILL"),
        ("kill@0 late_fault@1", 137, "rank 0 was ended by SIGKILL"),
    ],
    ids=["an error of the user", "a fault and its consequence", "a killed rank", "rank 0 killed"],
)
def test_first_error_is_on_top_and_no_rank_is_left(fake: Any, orders: str, code: int, message: str) -> None:
    begun = time.monotonic()
    done = fake.run("train", *TWO, FAKE_DO=orders)
    assert time.monotonic() - begun < 60
    assert done.returncode == code, done.stderr
    assert message in done.stderr and done.stderr.startswith("k3train: rank")
    assert "a consequence" not in done.stderr
    assert all(not Path(f"/proc/{s['pid']}").exists() for s in fake.seen())


@pytest.mark.parametrize(
    ("number", "layout"),
    [(signal.SIGTERM, []), (signal.SIGINT, []), (signal.SIGUSR1, TWO)],
    ids=["TERM to one process", "INT to one process", "USR1 to two ranks"],
)
def test_signals_reach_every_rank_and_the_requeue_code_comes_back(fake: Any, number: int, layout: list[str]) -> None:
    process = fake.start("train", *layout, FAKE_DO="wait_for_signal")
    ranks = 1 + bool(layout)
    until = time.monotonic() + 60
    while len(list(fake.out.glob("ready.*"))) < ranks and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=60) == launch.EXIT_REQUEUE
    assert [f.read_text() for f in sorted(fake.out.glob("signal.*"))] == [signal.Signals(number).name] * ranks


def test_ranks_end_when_the_launcher_is_killed(fake: Any) -> None:
    process = fake.start("train", *TWO, FAKE_DO="wait_for_signal")
    until = time.monotonic() + 60
    while len(list(fake.out.glob("ready.*"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    process.kill()
    while len(list(fake.out.glob("signal.*"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert [f.read_text() for f in sorted(fake.out.glob("signal.*"))] == ["SIGTERM", "SIGTERM"]
    process.communicate()


def test_another_model_in_the_run_folder_is_refused_before_ranks_start(fake: Any) -> None:
    from k3train.config.compose import save_resolved

    save_resolved(compose(), fake.folder / "runs/k3_tiny/config.yaml")
    (fake.folder / "runs/k3_tiny/metrics.jsonl").touch()
    done = fake.run("train", *TWO, "model.situ_beta=3")
    assert done.returncode == launch.EXIT_USER and "model.situ_beta: saved 4.0, asked 3.0" in done.stderr
    assert fake.seen() == []


def test_a_run_folder_that_cannot_be_written_is_refused_before_ranks_start(fake: Any) -> None:
    (fake.folder / "notes.txt").touch()
    done = fake.run("train", *TWO, "run.dir=notes.txt/runs")
    assert done.returncode == launch.EXIT_USER and done.stderr.count("\n") == 1
    assert "run.dir=notes.txt/runs: notes.txt/runs/k3_tiny cannot be written" in done.stderr
    assert fake.seen() == []


def test_a_login_node_is_refused_with_the_submit_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "slurm.conf").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(EnvironmentError_, match="k3train submit parallel.data=2 cluster=slurm"):
        launch.refuse_login_node("train", 2, ["parallel.data=2"])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    launch.refuse_login_node("train", 2, [])
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setenv("K3TRAIN_LOGIN_NODE", "allow")
    launch.refuse_login_node("train", 2, [])


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
STEP = {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "12", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8,4", "SLURM_JOB_ID": "42",
}  # fmt: skip


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, None),
        (TORCHRUN, launch.Place(3, 1, 4, 2, "torchrun")),
        (STEP, launch.Place(9, 1, 12, 4, "slurm")),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "6(x2)"}, launch.Place(9, 1, 12, 6, "slurm")),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}, None),
        ({**STEP, **TORCHRUN}, launch.Place(3, 1, 4, 2, "torchrun")),
        ({"RANK": "0", "WORLD_SIZE": "2"}, launch.Place(0, 0, 2, 1, "environment")),
    ],
    ids=["no launcher", "torchrun", "srun", "srun, even nodes", "the batch shell is no rank", "a step of one task",
         "torchrun inside srun", "bare RANK"],
)  # fmt: skip
def test_the_place_is_read_from_what_the_launcher_left(env: dict[str, str], place: launch.Place | None) -> None:
    assert launch.find_place(env) == place


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[03-05,9],x1", "n03"), ("a-b[1,2]", "a-b1"), ("a1,b[2-3]", "a1")],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert launch.first_node(nodes) == first


def test_torchrun_hands_rank_zeros_configuration_to_the_others(fake: Any) -> None:
    """Ranks above 0 never read their arguments: one is given nonsense and still gets rank 0's configuration."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2"}
    one = fake.start("train", "nonsense=1", **shared, RANK="1", LOCAL_RANK="1")
    zero = fake.start("train", *TWO, "model.kda.decay_bound=-3", **shared, RANK="0", LOCAL_RANK="0")
    said = zero.communicate(timeout=120)
    also = one.communicate(timeout=120)
    assert (zero.returncode, one.returncode) == (0, 0), said[1] + also[1]
    assert [s["bound"] for s in fake.seen()] == [-3.0, -3.0]
    assert "2 ranks from RANK and WORLD_SIZE" in said[0]
    assert fake.files() == set()


def test_an_error_of_rank_zero_ends_the_waiting_ranks(fake: Any) -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": "2"}
    one = fake.start("train", **shared, RANK="1", LOCAL_RANK="1")
    zero = fake.start("train", "lr=1", **shared, RANK="0", LOCAL_RANK="0")
    assert "did you mean optim.lr?" in zero.communicate(timeout=120)[1]
    assert "rank 0 could not compose" in one.communicate(timeout=120)[1]
    assert (zero.returncode, one.returncode) == (2, 2)
