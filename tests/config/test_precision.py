"""FP8 recipes in the configuration: what composes, what is refused and with which words."""

from __future__ import annotations

import pytest

from k3train.config.compose import compose
from k3train.config.precision import check_recipe, precision_of
from k3train.errors import ConfigError, EnvironmentError_

ALL = "train.bf16_parts=[kda_gates,router,attention_residuals,norms,head]"
FP8 = ["train.precision=fp8_block", "train.seq_length=256"]


def test_a_recipe_composes_with_the_parts_that_stay_in_bf16() -> None:
    config = compose([*FP8, "train.bf16_parts=[kda_gates,experts,router,attention_residuals,norms,head]"])
    precision = precision_of(config.train.precision, config.train.bf16_parts)
    assert precision.recipe == "fp8_block"
    assert precision.quantises("layers.3.attention.kv_b_proj")
    assert not precision.quantises("layers.3.moe.experts")
    assert not precision.quantises("layers.3.attention.f_b_proj")
    assert not precision.quantises("layers.3.moe.router")
    assert not precision_of("bf16", config.train.bf16_parts).quantises("layers.3.attention.kv_b_proj")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*FP8, "model.backend=local"], "model.backend=te"),
        ([*FP8, "engine=deepspeed"], "engine=megatron"),
        ([*FP8, "train.seq_length=250"], "train.seq_length=256"),
        ([*FP8, "train.bf16_parts=[kda_gates]"], "never run in FP8"),
        ([*FP8, "train.bf16_parts=[kda_gate,router,attention_residuals,norms,head]"], "kda_gates"),
        (["train.precision=fp8"], "fp8_block"),
        (["train.fp8_cache_weights=true"], "train.precision=fp8_current, or train.fp8_cache_weights=false"),
        ([*FP8, "train.fp8_cache_weights=true", "parallel.overlap_param_gather=true"], "overlap_param_gather=false"),
        ([*FP8, "train.cuda_graphs=step", ALL], r"train.bf16_parts='\[experts,kda_gates,"),
        (["train.activations.layer_inputs=fp8", "train.recompute=full"], "other experts.*layer_inputs=offload"),
        (["train.activations.norms=fp8"], "more memory.*norms=recompute"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_what_cannot_be_is_refused_before_anything_starts(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compose(overrides)


@pytest.mark.parametrize(
    ("recipe", "capability", "words"),
    [
        ("mxfp8", (9, 0), "Blackwell.*type train.precision=fp8_block"),
        ("fp8_block", (8, 9), "Hopper.*type train.precision=fp8_current"),
        ("fp8_current", (8, 0), "Ada.*type train.precision=bf16"),
    ],
)
def test_a_chip_too_old_for_a_recipe_is_told_which_it_can_run(
    recipe: str, capability: tuple[int, int], words: str
) -> None:
    with pytest.raises(EnvironmentError_, match=words):
        check_recipe(recipe, capability, "this GPU")


@pytest.mark.parametrize(("recipe", "capability"), [("mxfp8", (10, 0)), ("fp8_block", (9, 0)), ("fp8_current", (8, 9))])
def test_a_chip_that_can_is_not_refused(recipe: str, capability: tuple[int, int]) -> None:
    check_recipe(recipe, capability, "this GPU")
