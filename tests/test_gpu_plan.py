"""The list of what needs a GPU names what exists, and its runner keeps lanes, limits and what has passed."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_plan  # noqa: E402
from gpu_plan import Runner, Step, read_plan  # noqa: E402


@pytest.mark.parametrize("step", read_plan(), ids=lambda s: s.name)
def test_a_step_names_files_that_exist(step: Step) -> None:
    named = re.findall(r"(?:tests|benchmarks)/[\w/.]+", step.command)
    assert named or "k3train" in step.command, step.command
    assert [f for f in named if not (ROOT / f.rstrip(".")).exists()] == []


def test_the_runner_uses_both_gpus_and_leaves_out_what_has_passed(tmp_path: Path) -> None:
    say = 'echo "$CUDA_VISIBLE_DEVICES"; sleep 0.5'
    steps = [Step(f"one{i}", say, 30, "", alone=True) for i in range(2)]
    steps += [Step("two", say, 30, "", gpus=2), Step("fails", "exit 3", 30, "")]
    records = Runner([0, 1], tmp_path).run(steps)
    assert {r["name"]: r["rc"] for r in records} == {"one0": 0, "one1": 0, "two": 0, "fails": 3}
    seen = {s.name: (tmp_path / f"{s.name}.log").read_text().split() for s in steps}
    assert sorted(seen["one0"] + seen["one1"]) == ["0", "1"]
    assert seen["two"] in (["0,1"], ["1,0"])
    assert Runner([0], tmp_path).passed_before() == {"one0", "one1", "two"}
    assert "| fails | FAILED (rc 3)" in gpu_plan.table(steps, records, tmp_path)


def test_a_step_at_its_limit_says_where_it_stands(tmp_path: Path) -> None:
    there = tmp_path / "there"
    stuck = f"""{sys.executable} -c 'import pathlib, time
def stuck_here(): pathlib.Path("{there}").touch(); time.sleep(600)
stuck_here()'"""
    runner = Runner([0], tmp_path)
    runner.start(Step("stuck", stuck, 600, ""), [0])
    [job] = runner.running
    end = time.monotonic() + 120
    while not there.exists() and time.monotonic() < end:
        time.sleep(0.05)
    job.begun -= 601  # as if its time had passed
    records: list[dict[str, object]] = []
    while not records and time.monotonic() < end:
        records = runner.finished()
        time.sleep(0.05)
    assert records[0]["rc"] != 0
    assert records[0]["why"] == "at its limit of 600 s"
    assert "in stuck_here" in (tmp_path / "stuck.log").read_text()


def test_what_cannot_run_is_said_not_dropped(tmp_path: Path) -> None:
    steps = [Step("two", "true", 5, "", gpus=2), Step("long", "true", 500, ""), Step("short", "true", 5, "")]
    records = Runner([0], tmp_path, seconds=60).run(steps)
    assert {r["name"]: r.get("why") for r in records} == {
        "two": "needs 2 GPUs, there are 1", "long": "might not end in time", "short": None,
    }  # fmt: skip
    assert [json.loads(x)["rc"] for x in (tmp_path / "summary.jsonl").read_text().splitlines()] == [None, 0, None]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- {name: a, command: b, seconds: 1, proves: c, gpu: 1}", r"step a: unknown fields \['gpu'\]"),
        ("- {name: a, command: b, seconds: 1}", r"step a: fields \['proves'\] are missing"),
        ("- {name: a, command: b, seconds: 0, proves: c}", r"seconds is 0"),
        ("- {name: a, command: b, seconds: 1, proves: c}\n- {name: a, command: b, seconds: 1, proves: c}", "twice"),
    ],
    ids=["unknown field", "field missing", "no time", "name twice"],
)
def test_a_wrong_plan_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_plan(file)
