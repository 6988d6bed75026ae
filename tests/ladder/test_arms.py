"""What a comparison compares: equal sizes, one change at a time, and the same runs as the experiments' sweeps."""

from __future__ import annotations

import dataclasses

import pytest

from k3train import sweep
from k3train.config import compose as composing
from k3train.config.compose import compose
from k3train.config.schema import Config
from k3train.ladder import arms
from k3train.planning.parameters import count


def parameters(*words: str) -> int:
    return count(compose(list(words)).model).total


@pytest.mark.parametrize("experiment", ["ladder", "ladder_text"])
def test_rungs_have_the_same_parameters_within_two_percent(experiment: str) -> None:
    sizes = {name: parameters(f"experiment={experiment}", *arms.mixer(name)) for name in arms.MIXERS}
    assert max(sizes.values()) <= 1.02 * min(sizes.values()), sizes


def test_rungs_have_the_same_widths() -> None:
    shapes = [dataclasses.asdict(compose(["experiment=ladder", *arms.mixer(n)]).model) for n in arms.MIXERS]
    for shape in shapes:
        shape.pop("mixer"), shape.pop("hybrid")
    assert all(shape == shapes[0] for shape in shapes)


@pytest.fixture(scope="module")
def baseline() -> Config:
    return compose(["experiment=ablation"])


CHANGES = [(kind, name) for kind, found in arms.ABLATIONS.items() for name, changed in found.items() if changed]


@pytest.mark.parametrize(("kind", "name"), CHANGES, ids=[f"{kind}: {name}" for kind, name in CHANGES])
def test_an_arm_departs_from_the_baseline_in_what_it_says(baseline: Config, kind: str, name: str) -> None:
    changed = arms.ABLATIONS[kind][name]
    different = set(composing.diff(baseline, compose(["experiment=ablation", *changed])))
    keys = {"optim=muon_matrix": {"optim.muon.per_head"}, "optim=adamw": {"optim.name", "optim.muon.ns_dtype"}}
    allowed = set().union(*(keys.get(word, {word.partition("=")[0]}) for word in changed))
    assert different and different <= allowed


@pytest.mark.parametrize("kind", arms.ABLATIONS)
def test_an_ablation_is_the_sweep_of_its_experiment(kind: str) -> None:
    swept = [compose(job) for job in sweep.jobs(sweep.with_params([f"experiment=ablation_{kind}"]))]
    listed = [compose(["experiment=ablation", *changed]) for changed in arms.ABLATIONS[kind].values()]
    by_hand = [config for config in listed if config.optim.name == "adamw"]  # its rate differs too: a second command
    assert sorted(map(composing.dump, swept + by_hand)) == sorted(map(composing.dump, listed))
    assert len(by_hand) == (kind == "optimizer")


def test_the_ladder_is_one_sweep_of_its_experiment_over_the_tasks() -> None:
    """The second job list is that of the hybrid, which is a pattern of layers and not a mixer."""
    tasks = "data.corpus=" + ",".join(f'"{task}"' for name, task in arms.TRAINED.items() if name not in arms.LONGER)
    swept = sweep.jobs(sweep.with_params(["experiment=ladder", tasks]))
    swept += sweep.jobs(["experiment=ladder", tasks, "model.hybrid=3:1"])
    listed = [compose(list(arm.overrides)) for arm in arms.recall(1) if arm.group not in arms.LONGER]
    assert sorted(composing.dump(compose(job)) for job in swept) == sorted(map(composing.dump, listed))


@pytest.mark.parametrize("comparison", arms.COMPARISONS)
def test_every_arm_and_seed_is_there_once(comparison: str) -> None:
    keys = [arm.key for arm in arms.COMPARISONS[comparison](3)]
    assert len({key[:3] for key in keys}) == len({key[3] for key in keys}) == len(keys)
    assert {key[2] for key in keys} == {1, 2, 3}


@pytest.mark.parametrize("task", arms.TASKS)
def test_what_is_asked_was_trained(task: str) -> None:
    from k3data.recall import parse_task

    trained, asked = parse_task(arms.TRAINED[task]), [parse_task(suite) for suite in arms.suites(task)]
    assert all(one.length <= trained.length and one.kind == trained.kind for one in asked)
    assert asked[-1] == dataclasses.replace(trained, easiest=1.0)
