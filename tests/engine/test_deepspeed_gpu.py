"""Every stage of ZeRO on GPUs, with the kernels that a GPU brings: losses beside the megatron engine's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpu2)], ids=["one", "two"]
)
def test_losses_are_the_megatron_engines(ranks: int, tmp_path: Path) -> None:
    """Three bf16 steps of a 0.4 B model; the first loss comes before any update, the others carry rounding."""
    pytest.importorskip("deepspeed", reason="the extra deepspeed is not installed")
    out = tmp_path / "out.json"
    arms = "megatron DP,ZeRO-1,ZeRO-2,ZeRO-3"
    words = ["--ranks", str(ranks), "--arms", arms, "--limit", "60", "--json", str(out), "model.moe.experts=8"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "engines.py"), *words, "train.seq_length=1024"],
        capture_output=True, text=True, timeout=360, check=False, cwd=ROOT, env={**os.environ, "DS_BUILD_OPS": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    measured = json.loads(out.read_text())
    want = measured.pop("megatron DP")["losses"][:3]
    assert len(measured) == 3
    for arm, seen in measured.items():
        losses = seen["losses"][:3]
        assert losses[0] == pytest.approx(want[0], rel=1e-5), (arm, losses, want)
        assert losses == pytest.approx(want, rel=5e-4), (arm, losses, want)
