from __future__ import annotations

from pathlib import Path

import pytest

from k3train.errors import DataError
from k3train.tracking.commands import run_replay
from k3train.tracking.offline import find_offline_runs, read_offline_run
from tests.tracking.synthetic import records, write_run


@pytest.fixture(autouse=True)
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist"):
        run_replay(tmp_path)


@pytest.mark.ops
def test_a_replay_sends_the_whole_history_with_its_own_times_and_only_once(tmp_path: Path) -> None:
    rows = records(30)
    run = write_run(tmp_path / "run", rows)
    said: list[str] = []
    first = run_replay(run, say=said.append)
    assert (first.logged, first.skipped, first.mode) == (30, 0, "offline")
    assert first.run_id == (run / "wandb_id.txt").read_text().strip()
    assert "wandb sync" in said[-1]
    (path,) = find_offline_runs(run / "wandb")
    mirrored = read_offline_run(path)
    assert mirrored.config["train"] == {"steps": 200}
    by_step = {row["_step"]: row for row in mirrored.history}
    for row in rows:
        if "event" in row:
            continue
        there = by_step[row["step"]]
        assert there["_timestamp"] == row["time"]
        numbers = {key: value for key, value in row.items() if isinstance(value, (int, float))}
        assert {key: there[key] for key in numbers if key not in ("step", "time")} == {
            key: value for key, value in numbers.items() if key not in ("step", "time")
        }
    again = run_replay(run, say=said.append)
    assert (again.logged, again.skipped) == (0, 30)
    fresh = run_replay(run, fresh=True, say=said.append)
    assert fresh.run_id != first.run_id and fresh.logged == 30
