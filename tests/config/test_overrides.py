"""Overrides are refused before composition, with the right key in the message."""

from __future__ import annotations

import pytest

from k3train.config.compose import compose, conf_dir
from k3train.config.keys import all_keys, nearest
from k3train.config.overrides import check_overrides, groups
from k3train.errors import ConfigError

REFUSED = {
    "a misspelt key names the right one": ("model.kda.decay_bond=-5", "did you mean model.kda.decay_bound?"),
    "a plus does not let a misspelt key through": ("+model.kda.decay_bond=-5", "did you mean model.kda.decay_bound?"),
    "a double plus does not either": ("++model.kda.decay_bond=-5", "did you mean model.kda.decay_bound?"),
    "a key without its section is found by its last part": ("lr=0.1", "did you mean optim.lr?"),
    "a key in the wrong section is found by its last part": ("model.decay_bound=-5", "model.kda.decay_bound"),
    "None for null": ("model.kda.decay_bound=None", "type model.kda.decay_bound=null"),
    "None for null on a text key": ("data.prefix=None", "type data.prefix=null"),
    "None where null is no value either": ("model.kda.heads=None", "needs a whole number"),
    "null for a number that must be": ("train.steps=null", "needs a whole number"),
    "a fraction for a count": ("model.kda.heads=3.5", "needs a whole number"),
    "an exponent for a count says what to type": ("train.steps=1e3", "type train.steps=1000"),
    "text for a number": ("optim.lr=big", "needs a number"),
    "a number for true or false": ("model.moe.renormalize=2", "needs true or false"),
    "true for a number": ("train.steps=true", "needs a whole number"),
    "a bare word for a list": ("evaluate.suites=heldout", "type evaluate.suites=[heldout]"),
    "a word outside the choices": ("model.balancing=quantil", "did you mean model.balancing=quantile?"),
    "a word inside a nested dict": ("model.kda={head: 2}", "there is no key model.kda.head"),
    "one bad value of a sweep": ("model.balancing=quantile,sing", "did you mean model.balancing=sign?"),
    "an unknown option of a group": ("model=k4", "there are k3, k3_proxy, k3_tiny, kimi_linear_48b"),
    "an experiment with a plus": ("+experiment=smoke", "type experiment=smoke"),
    "a group that does not exist": ("models/a=b", "there is no config group"),
    "a key that exists, with a plus": ("+train.steps=3", "leave out the +"),
    "a key removed": ("~train.steps", "cannot be removed"),
    "a section given as a value": ("model.kda=5", "is a section"),
    "no equals sign": ("train.steps", "type key=value"),
    "unbalanced brackets": ("evaluate.suites=[a", "cannot be read"),
}


@pytest.mark.parametrize(("override", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=None) as caught:
        check_overrides([override], conf_dir())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "train.steps='64'",
        "model.kda.decay_bound=null",
        "model.kda.decay_bound=-4",
        "++train.steps=3",
        "experiment=null",
        "tracking.entity=none_such",
        "run.name=123",
        "evaluate.suites=[heldout,mqar]",
        "optim.lr=1e-3",
        "engine.offload=none",
        "hydra.verbose=true",
        "hydra/launcher=basic",
        "model.kda={heads: 4}",
        "train.steps=${train.eval_every}",
    ],
)
def test_accepted(override: str) -> None:
    check_overrides([override], conf_dir())


def test_every_key_of_the_schema_is_its_own_nearest() -> None:
    assert all(nearest(key)[0] == key for key in all_keys())


def test_every_option_of_every_group_composes() -> None:
    room = ["train.global_batch=64", "train.micro_batch=2"]  # enough sequences for the layouts that split them
    for group, options in groups(conf_dir()).items():
        for option in options:
            batch = [] if group in ("train", "experiment") else room
            assert compose([f"{group}={option}", *batch]).run.name
