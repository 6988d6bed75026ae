"""Each problem of a machine is named with its cure."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3train import doctor
from k3train.errors import ConfigError


def found(look: object) -> list[doctor.Finding]:
    return list(doctor._guarded(look))  # type: ignore[arg-type]


def states(findings: list[doctor.Finding]) -> set[str]:
    return {f.state for f in findings}


def test_this_environment_has_the_right_packages() -> None:
    assert doctor.BAD not in states(found(doctor.versions))


def test_a_wrong_version_and_a_missing_package_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "einops":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.4.1" if name == "numpy" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    bad = [f for f in found(doctor.versions) if f.state == doctor.BAD]
    assert {f.text for f in bad} == {"numpy 2.4.1, and <2.4 is needed", "einops is missing"}
    assert all("pip install" in f.cure for f in bad)


def test_a_variable_that_changes_the_model_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")
    assert any(f.state == doctor.BAD and "unset" in f.cure for f in found(doctor.environment))


def test_a_full_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = doctor.shutil.disk_usage("/")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage._replace(free=10**6))
    bad = [f for f in found(doctor.disk) if f.state == doctor.BAD]
    assert len(bad) == 2 and "run.dir" in bad[0].cure and "K3TRAIN_CACHE" in bad[1].cure


def test_a_key_or_none_for_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert states(found(doctor.tracking)) == {doctor.NOTE}
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert states(found(doctor.tracking)) == {doctor.GOOD}


@pytest.mark.parametrize(
    ("script", "state", "text"),
    [
        ("echo 'gpu* up 4'", doctor.GOOD, "gpu* up 4"),
        ("echo 'cannot contact slurmctld' >&2; exit 1", doctor.NOTE, "cannot contact slurmctld"),
    ],
    ids=["answers", "refuses"],
)
def test_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, state: str, text: str) -> None:
    for name in ("sbatch", "sinfo"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (finding,) = found(doctor.slurm)
    assert finding.state == state and text in finding.text


def test_a_machine_without_gpu_is_no_problem_unless_it_has_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert states(found(doctor.gpus)) == {doctor.GOOD}
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi" if name == "nvidia-smi" else None)
    (finding,) = found(doctor.gpus)
    assert finding.state == doctor.BAD and "CUDA_VISIBLE_DEVICES" in finding.cure


def test_a_failed_self_test_says_what_training_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "RuntimeError: the flux capacitor is empty\n")

    monkeypatch.setattr(doctor.subprocess, "run", run)
    findings = found(doctor.self_test)
    assert states(findings) == {doctor.BAD} and "flux capacitor" in findings[0].cure


def test_a_look_that_breaks_is_a_finding_and_the_code_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Iterator[doctor.Finding]:
        raise ConfigError("nothing works")
        yield

    monkeypatch.setattr(doctor, "LOOKS", [broken])
    assert doctor.doctor(["--no-self-test"]) == 1
    assert "ConfigError: nothing works" in capsys.readouterr().out


@pytest.mark.ops
def test_the_self_test_passes_here() -> None:
    assert states(found(doctor.self_test)) == {doctor.GOOD}
