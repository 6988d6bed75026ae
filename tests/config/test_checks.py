"""Sizes that do not fit are refused by name, with what to type."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import yaml

from k3train.config import checks
from k3train.config.compose import compose
from k3train.config.keys import all_keys
from k3train.config.schema import CHOICES, Config
from k3train.errors import ConfigError, LayoutError

LAYOUTS = {
    "heads do not divide by tensor": (["parallel.tensor=3"], "type parallel.tensor=2"),
    "vocabulary does not divide by tensor": (["parallel.tensor=2", "model.vocab_size=4095"], "model.vocab_size=4095"),
    "experts do not divide by expert": (["parallel.expert=3"], "type parallel.expert=2"),
    "expert does not divide the stage's ranks": (["parallel.expert=4", "parallel.world=2"], "parallel.world=4"),
    "sequence does not divide by context": (["parallel.context=3"], "train.seq_length=256"),
    "stream does not split for context and sequence parallelism": (
        ["parallel.context=2", "parallel.tensor=2", "train.seq_length=254", "train.micro_batch=1"],
        "do not divide by 8"),
    "batch does not divide by micro batch": (["train.micro_batch=3"], "type train.micro_batch=1"),
    "batch does not divide by data": (["parallel.data=3"], "type train.global_batch=12"),
    "world does not divide": (["parallel.world=3", "parallel.tensor=2"], "run 2 ranks"),
    "data and world disagree": (["parallel.world=4", "parallel.data=2"], "type parallel.data=4"),
    "virtual stages without pipeline": (["parallel.virtual=2"], "type parallel.virtual=1"),
    "more stages than layers": (["parallel.pipeline=8", "parallel.virtual=2"], "9 layers"),
    "virtual stages and odd micro-batches": (
        ["parallel.pipeline=2", "parallel.virtual=2", "train.micro_batch=8"], "type train.global_batch=16"),
    "expert tensor parallelism": (["parallel.expert_tensor=2"], "type parallel.expert_tensor=1"),
    "experts under tensor without sequence": (["parallel.tensor=2", "parallel.sequence=false"], "sequence=true"),
    "sequence without tensor": (["parallel.sequence=true"], "parallel.tensor above 1"),
    "layout with too few stages": (["parallel.pipeline=2", "parallel.pipeline_layout='E KKKFKKKFF L'"], "1 stages"),
    "layout of other layers": (["parallel.pipeline=2", "parallel.pipeline_layout='E KKKK|KKKFF'"], "KKKFKKKFF"),
    "gather overlap without reduce overlap": (["parallel.overlap_param_gather=true"], "overlap_grad_reduce=true"),
    "deepspeed with tensor": (["engine=deepspeed", "parallel.tensor=2"], "parallel.tensor=2"),
    "deepspeed with expert": (["engine=deepspeed", "parallel.expert=2", "train.micro_batch=1"], "type engine=megatron"),
    "deepspeed with the distributed optimizer": (["engine.name=deepspeed"], "type engine=deepspeed"),
    "batch ramp that does not divide": (["parallel.data=2", "schedule.batch_ramp='4:4:10'"], "multiple of 8"),
    "slots for less than an equal share": (["parallel.expert=2", "parallel.world=2", "parallel.expert_exchange=slots",
        "parallel.expert_capacity=0.8"], "type parallel.expert_capacity=1.25"),
    "shared experts beside an exchange that waits": (["parallel.expert=2", "parallel.world=2",
        "parallel.overlap_experts=true"], "type parallel.expert_exchange=sized"),
    "shared experts beside an exchange, and none": (["parallel.expert=2", "parallel.world=2", "model.moe.shared_experts=0",
        "parallel.expert_exchange=sized", "parallel.overlap_experts=true"], "shared_experts=0"),
    "an exchange with nobody": (
        ["parallel.expert_exchange=slots", "parallel.overlap_experts=true"], "type parallel.expert=2"),
    "slots under FP8 experts": (["parallel.expert=2", "parallel.world=2", "parallel.expert_exchange=slots",
        "train.precision=fp8_block", "train.bf16_parts=[router,attention_residuals,norms,head]"],
        "type train.bf16_parts='[experts,router,"),
    "batch ramp of too few micro-batches for virtual stages": (
        ["parallel.pipeline=2", "parallel.virtual=2", "schedule.batch_ramp='4:4:10'"], "multiple of 8",
    ),
}  # fmt: skip

VALUES = {
    "a bound below the floor": (["model.kda.decay_bound=-6"], "[-5.9, 0)"),
    "a bound of zero": (["model.kda.decay_bound=0"], "or null"),
    "as many chosen experts as there are": (["model.moe.top_k=16"], "must be below"),
    "an expert width that MXFP4 cannot group": (["model.moe.expert_hidden=48"], "type model.moe.expert_hidden=64"),
    "a latent width that MXFP4 cannot group": (["model.moe.latent=40"], "type model.moe.latent=64"),
    "a latent norm without a latent": (["model.moe.latent=null"], "latent_norm=false"),
    "a bad pattern": (["model.pattern=KXF"], "letters K and F"),
    "more dense layers than layers": (["model.dense_layers=10"], "9 layers"),
    "two mtp layers": (["model.mtp_layers=2"], "0 or 1"),
    "no steps": (["train.steps=0"], "above 0"),
    "a fraction above one": (["schedule.warmup_fraction=1.5"], "[0, 1]"),
    "a wsd that decays before it is warm": (["schedule.kind=wsd", "schedule.warmup_fraction=0.9"], "exceed 1"),
    "offload on the megatron engine": (["engine.offload=cpu"], "engine=deepspeed"),
    "a zero stage that does not exist": (["engine=deepspeed", "engine.zero_stage=4"], "1, 2 or 3"),
    "a profile that is no range": (["train.profile=10"], "START:STOP"),
    "offload of what is not recomputed": (["train.activations.layer_inputs=offload"], "type train.recompute=full"),
    "layers computed again under none": (["train.recompute_layers=4"], "type train.recompute=unit"),
    "layers computed again under selective": (
        ["train.recompute=selective", "train.recompute_layers=4"],
        "train.recompute=selective does so with none",
    ),
    "half of a unit": (
        ["train.recompute=unit", "train.recompute_layers=6"],
        "type train.recompute_layers=4 or train.recompute_layers=8",
    ),
    "less than a unit": (["train.recompute=unit", "train.recompute_layers=3"], "type train.recompute_layers=4"),
    "no layers computed again": (
        ["train.recompute=full", "train.recompute_layers=0"],
        "type train.recompute=none train.recompute_layers=null, or at least train.recompute_layers=1",
    ),
    "a negative number of layers": (["train.recompute=unit", "train.recompute_layers=-4"], "train.recompute_layers=4"),
    "more layers than there are": (["train.recompute=unit", "train.recompute_layers=12"], "exceeds the 9 layers"),
    "recomputing twice": (
        ["train.activations.units=recompute", "train.recompute=full"],
        "train.activations.units=auto",
    ),
    "FP8 copies of what is recomputed": (
        ["train.activations.gates=fp8", "train.recompute=unit"],
        "train.activations.gates=auto",
    ),
    "FP8 copies under exact gradients": (
        ["train.activations.units=fp8", "train.precision=fp32"],
        "train.precision=bf16",
    ),
    "graphs over an exchange with sizes": (
        ["train.cuda_graphs=step", "parallel.expert=2", "parallel.expert_exchange=sized"],
        "parallel.expert_exchange=slots",
    ),
    "graphs over slices of another mixer": (
        ["train.cuda_graphs=step", "parallel.context=2", "model.mixer=delta"],
        "only KDA's slices",
    ),
    "graphs over chunks that documents cut": (["train.cuda_graphs=step", "model.mixer=linear"], "on the host"),
    "graphs with gathers under way": (
        ["train.cuda_graphs=step", "parallel.overlap_param_gather=true", "parallel.overlap_grad_reduce=true"],
        "parallel.overlap_param_gather=true",
    ),
    "graphs and memory on the host": (
        ["train.cuda_graphs=step", "train.recompute=full", "train.activations.layer_inputs=offload"],
        "handed out again",
    ),
    "a run name with a slash": (["run.name=a/b"], "no slash"),
}


DEEPSPEED = {"engine.name": "deepspeed", "parallel.distributed_optimizer": False}


@functools.cache
def tiny() -> Config:
    return compose()


def with_values(overrides: list[str]) -> Config:
    """The default configuration with values set; what `compose` does, without its time."""
    config = copy.deepcopy(tiny())
    values: dict[str, Any] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        values |= DEEPSPEED if text == "engine=deepspeed" else {key: yaml.safe_load(value)}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        kind = all_keys()[key].kind
        setattr(checks.get(config, section), name, value if value is None or kind is list else kind(value))
    return config


def checked(overrides: list[str]) -> Config:
    config = with_values(overrides)
    checks.check(config)
    return config


@pytest.mark.parametrize(("overrides", "message"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layout_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        checked(overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(("overrides", "message"), VALUES.values(), ids=VALUES.keys())
def test_value_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        ([], 1),
        (["parallel.tensor=2"], 2),
        (["parallel.pipeline=2", "parallel.virtual=2"], 2),
        (["parallel.expert=2"], 2),
        (["parallel.expert=2", "parallel.tensor=2"], 2),
        (["parallel.expert=4", "parallel.context=2", "train.micro_batch=2"], 4),
        (["parallel.data=2", "parallel.tensor=2"], 4),
        (["parallel.world=4", "parallel.context=2"], 4),
    ],
)
def test_ranks_are_the_smallest_that_fit(overrides: list[str], world: int) -> None:
    assert checks.ranks(checked(overrides)) == world


def test_ranks_of_a_launcher_decide_and_contradictions_are_named() -> None:
    assert checks.ranks(checked([]), 4) == 4
    assert checks.data_parallel(checked(["parallel.tensor=2"]), 4) == 2
    with pytest.raises(LayoutError, match="launcher started 2 ranks"):
        checks.ranks(checked(["parallel.world=1"]), 2)
    with pytest.raises(LayoutError, match="run 2 ranks"):
        checks.check(checked(["parallel.tensor=2"]), 3)


def test_stage_layers_of_a_given_layout() -> None:
    config = checked(["parallel.pipeline=2", "parallel.pipeline_layout='E K K K|F KKK FF L'"])
    assert checks.stage_layers(config) == [3, 6]
    assert checks.stage_layers(checked([])) is None


@pytest.mark.parametrize("key", [k for k in CHOICES if not k.startswith("engine.")])
def test_every_choice_passes_the_checks(key: str) -> None:
    needed = ["train.recompute=full"] if key == "train.activations.layer_inputs" else []
    for word in CHOICES[key]:
        assert checked([f"{key}='{word}'", *needed])


@pytest.mark.parametrize(("mode", "numbers"), [("unit", (4, 8, 9)), ("full", (1, 3, 9))])
def test_layers_computed_again_end_with_a_region_or_with_the_model(mode: str, numbers: tuple[int, ...]) -> None:
    for number in numbers:
        config = checked([f"train.recompute={mode}", f"train.recompute_layers={number}"])
        assert config.train.recompute_layers == number


def test_every_ranged_key_exists() -> None:
    known = set(checks.all_fields(Config()))
    assert known >= {*checks._POSITIVE, *checks._FRACTIONS, *checks._NOT_NEGATIVE}


def test_micro_batches_of_a_step() -> None:
    assert checks.micro_batches(checked(["train.micro_batch=2", "train.global_batch=16", "parallel.data=2"])) == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim=muon", "parallel.data=2", "parallel.overlap_param_gather=true"], "overlap_param_gather=false"),
    ],
    ids=["Muon has no parameter gather to overlap"],
)
def test_combinations_that_are_not_built_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        compose(overrides)
