from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from k3train.tracking.commands import run_workspace
from k3train.tracking.workspace import SECTIONS, Lines, Media, build_workspace, workspace_json
from tests.tracking.synthetic import records


@pytest.fixture(autouse=True)
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def test_offline_the_workspace_is_written_as_json_with_every_section_and_panel(tmp_path: Path) -> None:
    said: list[str] = []
    path = run_workspace(project="p", entity="e", output=tmp_path / "w.json", say=said.append)
    assert path == tmp_path / "w.json" and "wrote" in said[0]
    content = json.loads((tmp_path / "w.json").read_text())
    assert (content["entity"], content["project"]) == ("e", "p")
    sections = content["spec"]["section"]["panelBankConfig"]["sections"]
    names = [section["name"] for section in sections]
    assert names == ["Loss", "Expert load", "Decay", "Depth attention", "Throughput", "Health"]
    for section, plan in zip(sections, SECTIONS):
        assert [panel["config"].get("chartTitle") for panel in section["panels"]] == [p.title for p in plan.panels]


def test_panels_survive_the_translation(tmp_path: Path) -> None:
    text = json.dumps(workspace_json(build_workspace("p", "e")))
    for section in SECTIONS:
        for panel in section.panels:
            for key in panel.keys:
                assert f'"{key}"' in text
            if isinstance(panel, Lines) and panel.pattern:
                assert json.dumps(panel.pattern) in text


def mirrored_keys() -> set[str]:
    """The keys that W&B gets from a run with these records."""
    keys: set[str] = set()
    for row in records(8):
        for key, value in row.items():
            if isinstance(value, list) and isinstance(value[0], list):
                keys.add(f"{key}_heatmap")
            elif isinstance(value, list):
                keys.update(f"{key}/{i:02d}" for i in range(len(value)))
            else:
                keys.add(key)
    return keys


OPTIONAL = {"train/memory_gb", "checkpoint/save_seconds"}  # logged on a GPU, and after a save


def test_every_panel_shows_a_metric_that_runs_log() -> None:
    keys = mirrored_keys()
    for section in SECTIONS:
        for panel in section.panels:
            if isinstance(panel, Media) or panel.keys:
                assert set(panel.keys) - OPTIONAL <= keys, panel.title
            else:
                assert any(re.fullmatch(panel.pattern, key) for key in keys), panel.title
