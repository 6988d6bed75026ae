"""Sweeps: each job its own name and its own fresh process."""

from __future__ import annotations

from typing import Any

import pytest

from k3train import sweep
from k3train.errors import ConfigError


def test_names_are_the_sorted_overrides() -> None:
    assert sweep.job_name("a", ["train.steps=3", "+model.kda.decay_bound=null"]) == (
        "a-model.kda.decay_bound=null,train.steps=3"
    )


def test_where_a_run_goes_is_no_part_of_its_name() -> None:
    assert (
        sweep.job_name("a", ["run.dir=/x", "hydra/launcher=basic", "run.name=a", "cluster=slurm", "cluster.nodes=2"])
        == "a"
    )
    assert sweep.job_name("a", ["run.dir=/x", "run.seed=3"]) == "a-run.seed=3"


def test_long_names_are_cut_and_stay_distinct() -> None:
    long = [f"model.kda.decay_bound=-{i}.12345678901234567890" for i in range(3)]
    first, second = sweep.suffix([*long, "train.steps=1"]), sweep.suffix([*long, "train.steps=2"])
    assert len(first) == len(second) == sweep.SUFFIX_LIMIT and first != second


def test_names_are_safe_folder_names() -> None:
    assert "/" not in sweep.suffix(["data.corpus=/a b/*.txt", "evaluate.suites=[x,y]"])


@pytest.mark.parametrize(
    ("overrides", "equal"),
    [
        (["train.steps=1,2"], False),
        (["train.steps=1,1"], True),
        (["data.corpus='a/b','a b'"], True),
        (["run.name=x,y"], False),
        (["run.name=x,x"], True),
        (["train.steps=1,2", "run.name=x,y"], False),
        (["train.steps=range(1,4)"], False),
        (["run.seed=1,2,3"], False),
        (["experiment=ablation_latent", "run.seed=1,2,3"], False),
    ],
)
def test_equal_names_are_refused(overrides: list[str], equal: bool) -> None:
    if not equal:
        sweep.refuse_equal_names(overrides)
        return
    with pytest.raises(ConfigError, match="give each value once"):
        sweep.refuse_equal_names(overrides)


def test_an_experiment_brings_its_own_sweep() -> None:
    from k3train.config.schema import CHOICES

    swept = sweep.with_params(["experiment=ladder", "train.steps=2"])
    assert swept[:2] == ["experiment=ladder", "train.steps=2"]
    mixers = [job[-1] for job in sweep.jobs(swept)]
    assert sorted(mixers) == sorted(f"model.mixer={mixer}" for mixer in CHOICES["model.mixer"])


@pytest.mark.parametrize(
    ("typed", "mixers"),
    [("model.mixer=kda,delta", ["kda", "delta"]), ("model.mixer=linear", ["linear"])],
    ids=["swept", "one"],
)
def test_what_is_typed_replaces_the_sweep_of_an_experiment(typed: str, mixers: list[str]) -> None:
    swept = sweep.with_params(["experiment=ladder", typed])
    assert sweep.jobs(swept) == [["experiment=ladder", f"model.mixer={mixer}"] for mixer in mixers]


def test_nothing_is_swept_where_nothing_says_so() -> None:
    assert sweep.with_params(["train.steps=2"]) == ["train.steps=2"]


def test_a_sweep_of_an_experiment_is_trained_once_a_value(fake: Any) -> None:
    done = fake.run("train", "-m", "experiment=ladder", "model.kda.decay_bound=null", "model.mixer=kda,linear")
    assert done.returncode == 0, done.stderr
    assert [s["name"].rpartition("=")[2] for s in fake.seen()] == ["kda", "linear"]


def test_a_sweep_runs_each_job_in_its_own_process_and_folder(fake: Any) -> None:
    done = fake.run("train", "-m", "model.kda.decay_bound=-5,null")
    assert done.returncode == 0, done.stderr
    seen = fake.seen()
    assert [(s["name"], s["bound"]) for s in seen] == [
        ("k3_tiny-model.kda.decay_bound=-5", -5.0),
        ("k3_tiny-model.kda.decay_bound=null", None),
    ]
    assert len({s["pid"] for s in seen}) == 2
    assert not any(".hydra" in f or f.endswith(".log") for f in fake.files())


@pytest.mark.ops
def test_a_failed_job_does_not_stop_the_sweep_and_shows_in_the_code(fake: Any) -> None:
    done = fake.run("train", "-m", "model.kda.decay_bound=-5,-7")
    assert done.returncode == 2
    assert "outside [-5.9, 0)" in done.stderr
    assert [s["bound"] for s in fake.seen()] == [-5.0]
    assert "k3_tiny-model.kda.decay_bound=-5: done" in done.stdout


@pytest.mark.ops
def test_a_job_of_two_ranks_starts_them(fake: Any) -> None:
    done = fake.run("train", "-m", "parallel.data=2", "train.micro_batch=1", "train.steps=3,4")
    assert done.returncode == 0, done.stderr
    assert [(s["rank"], s["world"]) for s in fake.seen()] == [(0, 2), (1, 2)] * 2


@pytest.mark.parametrize("name", ["k3_tiny", "ladder-model.mixer=kda,train.steps=3"])
def test_the_name_of_a_job_can_be_typed_again(name: str) -> None:
    import shlex

    from k3train.config.compose import compose
    from k3train.train.run import run_name_word

    (word,) = shlex.split(run_name_word(name))
    assert compose([word]).run.name == name
