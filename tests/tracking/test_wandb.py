from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3train.errors import ConfigError
from k3train.tracking.jsonl import read_jsonl
from k3train.tracking.offline import OfflineRun, find_offline_runs, payloads, read_offline_run, read_table
from k3train.tracking.tracker import Tracker
from k3train.tracking.wandb import WandbMirror, WandbSettings, has_api_key, resolve_mode, settle_run_id
from tests.tracking.synthetic import records

PATIENT = 300.0  # seconds: how long a busy machine may take to end the child
CONFIG = {"run": {"name": "r"}, "model": {"layers": 10}}


@pytest.fixture(autouse=True)
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_DISABLED", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def log_all(tracker: Tracker, rows: list[dict]) -> None:
    for row in rows:
        if "event" in row:
            tracker.event(row["event"], row["message"], row["step"])
        else:
            tracker.log(row["step"], {k: v for k, v in row.items() if k not in ("step", "time")})


def assert_mirrors(history: list[dict], runs: list[OfflineRun], media_every: int) -> None:
    """Every number of the JSONL is in W&B under the same step; matrices as tables, every `media_every` steps."""
    mirrored = {row["_step"]: row for run in runs for row in run.history}
    owner = {row["_step"]: run for run in runs for row in run.history}
    rows = [r for r in history if "event" not in r]
    assert sorted(mirrored) == [r["step"] for r in rows]
    tables = 0
    for row in rows:
        there = mirrored[row["step"]]
        for key, value in row.items():
            if key in ("step", "time"):
                continue
            if not isinstance(value, list):
                assert there[key] == value, (row["step"], key)
            elif isinstance(value[0], list):
                if f"{key}_table.path" in there:
                    _, cells = read_table(owner[row["step"]], there, f"{key}_table")
                    assert [cell[2] for cell in cells] == [x for line in value for x in line]
                    assert f"{key}_heatmap.path" in there
                    tables += key == "moe/load"
            else:
                assert [there[f"{key}/{i:02d}"] for i in range(len(value))] == value
    assert tables >= len(rows) // media_every


def test_an_offline_run_holds_what_the_jsonl_holds(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, CONFIG, run_name="r", settings=WandbSettings(media_every=10, close_timeout_s=PATIENT))
    log_all(tracker, records(40))
    account = tracker.close()
    assert account["mode"] == "offline" and account["dropped"] == 0 and account["problem"] == ""
    (path,) = find_offline_runs(tmp_path)
    run = read_offline_run(path)
    assert run.run_id == tracker.run_id and run.name == "r" and run.finished
    assert {k: v for k, v in run.config.items() if k != "_wandb"} == CONFIG
    assert_mirrors(read_jsonl(tmp_path / "metrics.jsonl"), [run], 10)
    events = {k: v for row in run.history for k, v in row.items() if k.startswith("event/")}
    assert set(events) == {"event/save", "event/skip"}


@pytest.mark.ops
def test_a_resumed_run_keeps_its_id_and_its_steps_never_go_back(tmp_path: Path) -> None:
    rows = [r for r in records(30) if "event" not in r]
    patient = WandbSettings(close_timeout_s=PATIENT)
    first = Tracker(tmp_path, CONFIG, run_name="r", settings=patient)
    log_all(first, rows[:20])
    first.close()
    second = Tracker(tmp_path, CONFIG, run_name="r", resume_step=15, resume_id=first.run_id, settings=patient)
    assert second.run_id == first.run_id
    log_all(second, rows[15:])
    account = second.close()
    assert account["skipped"] == 5, "steps 16-20 are in W&B already"
    runs = [read_offline_run(p) for p in find_offline_runs(tmp_path)]
    assert [run.run_id for run in runs] == [first.run_id] * 2
    assert [row["_step"] for run in runs for row in run.history] == list(range(1, 31))
    assert_mirrors(read_jsonl(tmp_path / "metrics.jsonl"), runs, 50)


@pytest.mark.ops
def test_a_killed_trainer_leaves_a_complete_offline_run(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time; from k3train.tracking.tracker import Tracker\n"
        "t = Tracker(sys.argv[1], {}, run_name='r')\n"
        "for s in range(1, 51): t.log(s, {'train/loss': 1.0 / s})\n"
        "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    deadline = time.monotonic() + PATIENT
    while time.monotonic() < deadline:
        status = tmp_path / "wandb" / "mirror.json"
        if status.exists() and json.loads(status.read_text())["finished"]:
            break
        time.sleep(0.2)
    (path,) = find_offline_runs(tmp_path)
    run = read_offline_run(path)
    assert run.finished and [row["_step"] for row in run.history] == list(range(1, 51))


@pytest.mark.ops
def test_a_signal_to_the_whole_group_does_not_cost_the_mirror(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, {}, run_name="r", settings=WandbSettings(close_timeout_s=PATIENT))
    tracker.log(1, {"train/loss": 1.0})
    child = tracker.mirror._child
    assert child is not None
    while not tracker.mirror.status():
        time.sleep(0.1)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(child.pid, number)
    tracker.log(2, {"train/loss": 0.5})
    assert tracker.close()["problem"] == ""
    (path,) = find_offline_runs(tmp_path)
    assert [row["_step"] for row in read_offline_run(path).history] == [1, 2]


@pytest.mark.ops
def test_a_signal_before_the_child_is_ready_does_not_cost_the_mirror(tmp_path: Path) -> None:
    mirror = WandbMirror(tmp_path, "r", "abc", {}, WandbSettings(mode="offline"))
    child = mirror._spawn()  # its Python is only starting
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        os.kill(child.pid, number)
    assert child.stdin is not None
    child.stdin.close()  # nothing to mirror: it ends by itself
    assert child.wait(PATIENT) == 0
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "only the child starts with them blocked"


def test_a_dead_network_slows_no_step_and_the_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the discard port: refused at once or silent
    tracker = Tracker(tmp_path, {}, run_name="r", settings=WandbSettings(init_timeout_s=5.0, close_timeout_s=PATIENT))
    assert tracker.mirror.mode == "online"
    waits = []
    for step in range(1, 201):
        start = time.perf_counter()
        tracker.log(step, {"train/loss": 1.0 / step})
        waits.append(time.perf_counter() - start)
        time.sleep(0.005)
    assert sorted(waits)[180] < 0.05, "nine steps of ten; a busy machine may stall any process for longer"
    account = tracker.close()
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 200
    steps = [row["_step"] for p in find_offline_runs(tmp_path) for row in read_offline_run(p).history]
    assert steps == list(range(1, 201)), account
    assert account["mode"] == "offline" and "online refused" in account["error"]


def test_a_child_that_dies_is_reported_and_costs_nothing(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, {}, run_name="r")
    tracker.mirror.start()
    child = tracker.mirror._child
    assert child is not None
    child.kill()
    child.wait()
    for step in range(1, 4):
        tracker.log(step, {"train/loss": 1.0})
    account = tracker.close()
    assert "ended" in account["problem"] and account["dropped"] >= 1
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3


def test_a_child_that_hangs_fills_the_queue_and_is_ended_at_close(tmp_path: Path) -> None:
    settings = WandbSettings(mode="offline", queue_records=10, close_timeout_s=0.5)
    mirror = WandbMirror(tmp_path, "r", "abc", {}, settings)
    mirror.start()
    assert mirror._child is not None
    os.kill(mirror._child.pid, signal.SIGSTOP)
    filler = "x" * 100_000  # the pipe itself holds 64 KiB
    waits = []
    for step in range(50):
        start = time.perf_counter()
        mirror.log(step, {"text": filler})
        waits.append(time.perf_counter() - start)
    assert sorted(waits)[45] < 0.05 and mirror.dropped >= 30
    account = mirror.close()
    assert "did not finish in time" in account["problem"]


def test_a_run_that_has_nothing_left_to_do_leaves_no_empty_wandb_run(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, {}, run_name="r", resume_step=None)
    tracker.event("config", "train.steps: 100 -> 100", 0)
    assert tracker.close() == {"mode": "offline", "sent": 0, "dropped": 0, "problem": ""}
    assert not (tmp_path / "wandb").exists()


def test_disabled_starts_no_process_and_leaves_no_folder(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, {}, run_name="r", wandb_mode="disabled")
    tracker.log(1, {"train/loss": 1.0})
    assert tracker.close()["mode"] == "disabled"
    assert not (tmp_path / "wandb").exists() and len(read_jsonl(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize(
    ("mode", "environ", "resolved"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "k"}, "online"),
        ("auto", {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_API_KEY": "k", "WANDB_DISABLED": "true"}, "disabled"),
        ("offline", {"WANDB_API_KEY": "k"}, "offline"),
        ("online", {}, "online"),
    ],
)
def test_the_mode_follows_the_key(mode: str, environ: dict[str, str], resolved: str) -> None:
    assert resolve_mode(mode, {"NETRC": "/nonexistent", **environ}) == resolved


def test_an_unknown_mode_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="auto, offline, online, disabled"):
        resolve_mode("onlin")


def test_a_netrc_entry_of_the_server_counts_as_a_key(tmp_path: Path) -> None:
    path = tmp_path / "netrc"
    path.write_text("machine api.wandb.ai login user password secret\n")
    assert has_api_key({"NETRC": str(path)})
    assert not has_api_key({"NETRC": str(path), "WANDB_BASE_URL": "https://wandb.example.org"})


def test_the_run_id_comes_from_the_checkpoint_then_the_folder_then_chance(tmp_path: Path) -> None:
    first = settle_run_id(tmp_path, None)
    assert len(first) == 8 and settle_run_id(tmp_path, None) == first
    assert settle_run_id(tmp_path, "fromckpt") == "fromckpt"
    assert (tmp_path / "wandb_id.txt").read_text() == "fromckpt\n"


def test_a_torn_wandb_file_is_read_up_to_the_tear(tmp_path: Path) -> None:
    body = b"x" * 40_000  # spans two blocks: a first and a last piece
    block = 32_768
    room = block - 7 - 7
    whole = b":W&B\x00\x00\x00" + (0).to_bytes(4, "little") + room.to_bytes(2, "little") + b"\x02" + body[:room]
    whole += (0).to_bytes(4, "little") + (len(body) - room).to_bytes(2, "little") + b"\x04" + body[room:]
    again = whole + (0).to_bytes(4, "little") + (5).to_bytes(2, "little") + b"\x01ab"
    path = tmp_path / "run.wandb"
    path.write_bytes(again)
    assert list(payloads(path)) == [body]
