"""The rendered sbatch script: what it asks of Slurm, what it runs, what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from k3train import cli, submit
from k3train.config.compose import compose
from k3train.errors import ConfigError, LayoutError

CPU = ["cluster=slurm_cpu", "train.micro_batch=1"]
GPU = ["cluster=slurm", "train.micro_batch=1"]


def rendered(*overrides: str) -> str:
    return submit.render(compose(list(overrides)), list(overrides))


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["submit", *words])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.mark.parametrize(
    ("overrides", "present", "absent"),
    [
        (GPU, ["--ntasks-per-node=8", "--gpus-per-node=8", "--requeue", "--open-mode=append"], ["gpus-per-task"]),
        (GPU, ["--kill-on-bad-exit=1", "--cpu-bind=cores", "scontrol requeue"], ["singleton"]),
        (CPU, ["--nodes=2", "--ntasks-per-node=1"], ["--gpus-per-node", "--cpu-bind"]),
        ([*GPU, "cluster.partition=p", "cluster.account=a", "cluster.qos=q", "cluster.mem=0"],
         ["--partition=p", "--account=a", "--qos=q", "--mem=0"], []),
        ([*GPU, "cluster.requeue=false"], ["--no-requeue", "--dependency=singleton", "scancel"], ["scontrol requeue"]),
        ([*GPU, "cluster.launcher=torchrun"], ["torch.distributed.run --nnodes=1", "--ntasks-per-node=1"], []),
        ([*GPU, "cluster.container_runtime=pyxis", "cluster.container=/i.sqsh"],
         ["--container-image=/i.sqsh", '--container-mounts="$PWD:$PWD"', "python -m k3train.cli train"], ["apptainer"]),
        ([*GPU, "cluster.container_runtime=apptainer", "cluster.container=/i.sif"],
         ["apptainer exec --nv", "/i.sif"], ["--container-image"]),
        ([*GPU, "cluster.setup=['module load cuda','export A=1']"], ["module load cuda\nexport A=1"], []),
        ([*GPU, "cluster.extra=['--exclusive']"], ["#SBATCH --exclusive"], []),
        ([*GPU, "run.name='a b'"], ["'/"], []),
        ([*GPU, "cluster.max_restarts=3"], ["-ge 3"], []),
    ],
    ids=["GPU ranks", "the step", "CPU ranks", "site options", "a chain", "torchrun", "pyxis", "apptainer", "set-up",
         "extra options", "a name with a space", "restarts"],
)  # fmt: skip
def test_the_script_says_what_was_asked(overrides: list[str], present: list[str], absent: list[str]) -> None:
    text = rendered(*overrides)
    assert all(word in text for word in present), text
    assert not any(word in text for word in absent), text
    assert "@" not in "".join(line for line in text.splitlines() if not line.startswith("#SBATCH")).replace("$@", "")


@pytest.mark.parametrize("overrides", [GPU, CPU, [*GPU, "cluster.launcher=torchrun"], [*GPU, "cluster.requeue=false"]])
def test_the_script_is_sound_bash(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "job").write_text(rendered(*overrides))
    assert subprocess.run(["bash", "-n", str(tmp_path / "job")], capture_output=True).stderr == b""


@pytest.mark.parametrize("script", sorted(Path("slurm").glob("*.sbatch")), ids=lambda p: p.name)
def test_the_plain_scripts_are_sound_bash_and_compose(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).stderr == b""
    assert "#SBATCH --job-name=" in script.read_text()


def test_the_overrides_reach_the_ranks_quoted() -> None:
    text = rendered(*CPU, "data.corpus='default'", "model.kda.decay_bound=null")
    assert (
        "train cluster=slurm_cpu train.micro_batch=1 'data.corpus='\"'\"'default'\"'\"'' model.kda.decay_bound=null"
        in text
    )


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ([], ConfigError, "type cluster=slurm"),
        ([*CPU, "cluster.nodes=3"], LayoutError, "does not divide"),
        ([*CPU, "parallel.world=4"], LayoutError, "launcher started 2 ranks"),
        ([*GPU, "cluster.container_runtime=pyxis"], ConfigError, "type cluster.container=IMAGE"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rendered(*overrides)


def test_the_lead_is_taken_from_the_measured_saves(tmp_path: Path) -> None:
    place = [*CPU, f"run.dir={tmp_path}"]
    assert "--signal=B:USR1@120" in rendered(*place)
    lines = [{"step": 1, "train/step_seconds": 5.0}, {"step": 2, "checkpoint/save_seconds": 40.0}]
    (tmp_path / "k3_tiny").mkdir()
    (tmp_path / "k3_tiny/metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"torn')
    assert f"--signal=B:USR1@{3 * 40 + 2 * 5 + 30}" in rendered(*place)
    assert "--signal=B:USR1@77" in rendered(*place, "cluster.signal_lead=77")


def test_a_dry_run_shows_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = shown(capsys, *CPU, "--dry-run")
    assert code == 0 and out.startswith("#!/bin/bash") and list(tmp_path.iterdir()) == []


def test_a_sweep_is_a_job_a_combination(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = shown(capsys, "-m", "--dry-run", *CPU, "model.kda.decay_bound=-5,null")
    names = [line for line in out.splitlines() if "--job-name" in line]
    assert code == 0
    assert names == [
        "#SBATCH --job-name=k3_tiny-model.kda.decay_bound=-5,train.micro_batch=1",
        "#SBATCH --job-name=k3_tiny-model.kda.decay_bound=null,train.micro_batch=1",
    ]


def test_an_experiment_that_sweeps_by_itself_is_a_job_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = shown(capsys, "-m", "--dry-run", *CPU, "experiment=ladder")
    names = [line for line in out.splitlines() if "--job-name" in line]
    assert code == 0, err
    mixers = [re.search(r"model\.mixer=(\w+)", name)[1] for name in names]  # type: ignore[index]
    assert sorted(mixers) == sorted(["softmax", "linear", "delta", "gated_delta", "kda"])
    assert out.count("model.mixer=") >= 2 * len(names)  # in the name and in the command


def test_without_sbatch_the_answer_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code, _, err = shown(capsys, *CPU)
    assert code == 2 and "--dry-run" in err


def test_sbatch_gets_the_script_and_its_refusal_is_passed_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin/sbatch"
    sbatch.write_text("#!/bin/sh\necho 41\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    code, out, _ = shown(capsys, *CPU)
    assert code == 0 and "submitted job 41" in out and (tmp_path / "runs/k3_tiny/job.sbatch").is_file()
    sbatch.write_text("#!/bin/sh\necho 'invalid account' >&2; exit 1\n")
    code, _, err = shown(capsys, *CPU)
    assert code == 2 and "invalid account" in err


def test_a_chain_submits_its_jobs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 41\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    _, out, _ = shown(capsys, *CPU, "cluster.requeue=false", "cluster.chain=3")
    assert out.count("submitted job 41") == 3


def test_a_misspelt_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = shown(capsys, *CPU, "--dryrun")
    assert code == 2 and "--dry-run" in err


@pytest.mark.parametrize(
    ("env", "code", "left", "written"),
    [
        ({}, 75, 75, "75"),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, 75, 0, "75"),
        ({"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, 75, 0, None),
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_STEP_ID": "0"}, 75, 0, "75"),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_STEP_ID": "0"}, 75, 0, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_STEP_ID": "0"}, 1, 1, None),
    ],
    ids=["one process", "rank 0 of torchrun", "rank 1 of torchrun", "rank 0 of srun", "rank 1 of srun", "a fault"],
)
def test_a_planned_stop_does_not_make_the_launcher_end_the_other_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, env: dict[str, str], code: int, left: int, written: str | None
) -> None:
    from k3train import launch

    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**env, "K3TRAIN_EXIT_FILE": str(tmp_path / "code")}.items():
        monkeypatch.setenv(name, value)
    assert launch.leave_code(code) == left
    assert ((tmp_path / "code").read_text().strip() if (tmp_path / "code").exists() else None) == written
