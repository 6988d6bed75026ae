"""Run the console script with a stand-in for training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAKE = Path(__file__).parent / "fake"
SLURM_WORDS = ("SLURM", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC", "OMP_NUM_THREADS")


class Fake:
    """One scratch folder: run the command line in it, then see what the stand-ins saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "seen"
        self.out.mkdir()

    def environment(self, **extra: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(SLURM_WORDS)}
        return {**clean, "PYTHONPATH": str(FAKE), "FAKE_OUT": str(self.out), **extra}

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "k3train.cli", *words]

    def run(self, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            cwd=self.folder,
            env=self.environment(**extra),
            capture_output=True,
            text=True,
            timeout=120,
        )

    def start(self, *words: str, **extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words), cwd=self.folder, env=self.environment(**extra), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def seen(self) -> list[dict[str, Any]]:
        found = [json.loads(f.read_text()) for f in sorted(self.out.glob("*.json"))]
        return sorted(found, key=lambda s: (s["name"], s["rank"]))

    def files(self) -> set[str]:
        return {
            str(f.relative_to(self.folder)) for f in self.folder.rglob("*") if f.is_file() and self.out not in f.parents
        }


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Any]:
    return Fake(tmp_path)  # type: ignore[return-value]
