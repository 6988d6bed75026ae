from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from k3train.tracking import jsonl
from k3train.tracking.jsonl import JsonlWriter, discarded_path, encode_line, read_jsonl


def write_steps(path: Path, first: int, last: int, resume_step: int | None = None) -> None:
    writer = JsonlWriter(path, resume_step)
    for step in range(first, last + 1):
        writer.write(step, {"train/loss": 10.0 / step})
    writer.close()


def metrics_of(path: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["train/loss"]) for r in read_jsonl(path) if "train/loss" in r]


def test_what_is_written_is_read_back_to_the_last_bit(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "m.jsonl")
    loss = 1.0 / 3.0 + 1e-16
    writer.write(1, {"train/loss": loss, "moe/load": [[1.0, 0.5]], "train/consumed_tokens": 2**53 + 1})
    writer.close()
    (record,) = read_jsonl(tmp_path / "m.jsonl")
    assert record["train/loss"] == loss
    assert record["moe/load"] == [[1.0, 0.5]]
    assert record["train/consumed_tokens"] == 2**53 + 1
    assert record["step"] == 1 and record["time"] > 1e9


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=["nan", "infinity", "minus infinity"])
def test_a_non_finite_loss_is_strict_json_and_comes_back(tmp_path: Path, value: float) -> None:
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write(1, {"train/loss": value, "layers": [value, 1.0]})
    writer.close()
    text = (tmp_path / "m.jsonl").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"bare {name} is not JSON"))
    (record,) = read_jsonl(tmp_path / "m.jsonl")
    assert repr(record["train/loss"]) == repr(value) and repr(record["layers"][0]) == repr(value)


def test_numpy_values_are_written_as_numbers() -> None:
    line = json.loads(encode_line({"a": np.float32(0.5), "b": np.arange(3), "c": np.int64(7)}))
    assert line == {"a": 0.5, "b": [0, 1, 2], "c": 7}


def test_a_large_matrix_is_rounded_as_a_small_one_is() -> None:
    values = np.random.default_rng(0).lognormal(0, 3, (40, 50)) * np.asarray([1.0, -1.0] * 25)
    values[0, :3] = [0.0, 1e-30, 1e30]
    large = json.loads(encode_line({"m": values}))["m"]
    small = json.loads(encode_line({"m": [row[None] for row in values]}))["m"]
    np.testing.assert_allclose(large, [row[0] for row in small], rtol=1e-12)
    assert large[1][1] == small[1][0][1]


def test_a_large_matrix_with_a_nan_or_uneven_rows_is_written_too(tmp_path: Path) -> None:
    matrix = np.ones((40, 50))
    matrix[3, 4] = np.nan
    uneven = [[1.0] * 60, *([0.5] * n for n in range(1, 40))]
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.write(1, {"a": matrix, "b": uneven})
    writer.close()
    (record,) = read_jsonl(tmp_path / "m.jsonl")
    assert math.isnan(record["a"][3][4]) and record["a"][0][0] == 1.0 and record["b"] == uneven


def test_an_object_that_is_no_metric_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="object"):
        encode_line({"a": object()})


def test_resume_sets_the_lines_past_the_checkpoint_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 8)
    write_steps(path, 6, 9, resume_step=5)
    assert [step for step, _ in metrics_of(path)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [r["step"] for r in read_jsonl(discarded_path(path))] == [6, 7, 8]
    events = [r for r in read_jsonl(path) if "event" in r]
    assert [(e["event"], e["step"]) for e in events] == [("resume", 5)]
    assert "3 lines" in events[0]["message"]


def test_a_new_start_in_an_old_folder_keeps_the_old_lines_beside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 3)
    write_steps(path, 1, 2)
    assert [step for step, _ in metrics_of(path)] == [1, 2]
    assert len(read_jsonl(discarded_path(path))) == 3


def test_a_torn_last_line_is_passed_over_and_cut_at_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 3)
    with open(path, "ab") as file:
        file.write(b'{"step": 4, "train/lo')
    assert [step for step, _ in metrics_of(path)] == [1, 2, 3]
    write_steps(path, 4, 4, resume_step=3)
    assert [step for step, _ in metrics_of(path)] == [1, 2, 3, 4]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_damaged_middle_line_is_reported_and_the_rest_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\x00\x00broken\n" + lines[2])
    assert [step for step, _ in metrics_of(path)] == [1, 3]
    assert "line 2" in caplog.text


def test_a_crash_between_copy_and_cut_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 6)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(jsonl, "write_atomically", crash)
        with pytest.raises(KeyboardInterrupt):
            JsonlWriter(path, 4)
    assert [step for step, _ in metrics_of(path)] == [1, 2, 3, 4, 5, 6]


def test_rewind_inside_a_living_run_continues_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    for step in range(1, 7):
        writer.write(step, {"train/loss": float(step)})
    writer.rewind(4, "loss exploded")
    writer.write(5, {"train/loss": 50.0})
    writer.close()
    assert metrics_of(path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0)]
    (event,) = [r for r in read_jsonl(path) if "event" in r]
    assert event["event"] == "rollback" and "loss exploded" in event["message"]


def test_a_full_disk_delays_lines_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(1, {"train/loss": 1.0})
    real = os.write

    def half_then_full(fd: int, data: bytes) -> int:
        if fd == writer._fd:
            real(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half_then_full)
        writer.write(2, {"train/loss": 2.0})
        writer.write(3, {"train/loss": 3.0})
        assert [step for step, _ in metrics_of(path)] == [1], "no half line may stay"
    writer.write(4, {"train/loss": 4.0})
    writer.close()
    assert metrics_of(path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert writer.lost == 0


def test_lines_written_before_a_kill_are_in_the_file(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from k3train.tracking.jsonl import JsonlWriter\n"
        "w = JsonlWriter(sys.argv[1])\n"
        "for s in range(1, 101): w.write(s, {'train/loss': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m.jsonl")], check=False)
    assert done.returncode == -9
    assert len(read_jsonl(tmp_path / "m.jsonl")) == 100


def test_importing_the_package_loads_neither_wandb_nor_matplotlib() -> None:
    code = (
        "import sys, k3train.tracking.tracker, k3train.tracking.progress, k3train.tracking.plots, "
        "k3train.tracking.commands, k3train.tracking.report\n"
        "print([m for m in ('wandb', 'matplotlib', 'wandb_workspaces') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
