"""Which products run in FP8, by which recipe, and what a GPU must be able to do for it.

A recipe (`train.precision`) is transformer-engine's; `train.bf16_parts` lists what stays in BF16. Weights, gradients,
optimizer state and everything between the products are those of a BF16 run under every recipe.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from k3train.errors import ConfigError, EnvironmentError_

RECIPES = {
    "fp8_block": ((9, 0), "Hopper"),
    "fp8_current": ((8, 9), "Ada"),
    "mxfp8": ((10, 0), "Blackwell"),
}
"""Recipe -> the compute capability it needs, and the generation that brought it."""

PARTS = {
    "attention": r"layers\.\d+\.attention\.(q|k|v|o|q_b|kv_b)_proj",
    "mla_latents": r"layers\.\d+\.attention\.(q_a|kv_a)_proj",
    "output_gates": r"layers\.\d+\.attention\.(g|g_a|g_b)_proj",
    "kda_gates": r"layers\.\d+\.attention\.(f_a|f_b|a|b)_proj",
    "dense": r"layers\.\d+\.mlp\.(gate|up|down)_proj",
    "shared_experts": r"layers\.\d+\.moe\.shared_experts\.(gate|up|down)_proj",
    "latent": r"layers\.\d+\.moe\.latent_(down|up)",
    "experts": r"layers\.\d+\.moe\.experts",
}
"""Part of the model -> the names of its modules that hold a product which a recipe can quantise."""

NEVER_FP8 = ("router", "attention_residuals", "norms", "head")
"""Parts that no recipe touches; they stand among the BF16 parts so that the list is whole."""

MULTIPLE = 16
"""Every dimension of an FP8 product is a multiple of this."""


@dataclass(frozen=True)
class Precision:
    """recipe: a key of RECIPES, or None for no FP8. bf16_parts: what the recipe leaves alone.

    cache_weights: weights are quantised once a step instead of once a micro-batch.
    """

    recipe: str | None = None
    bf16_parts: tuple[str, ...] = ("experts", "kda_gates", *NEVER_FP8)
    cache_weights: bool = False

    def quantises(self, module: str) -> bool:
        """Whether the products of the module of this name run in FP8."""
        part = part_of(module)
        return self.recipe is not None and part is not None and part not in self.bf16_parts

    def describe(self) -> str:
        """What runs in what, for the start of a run."""
        if self.recipe is None:
            return "bf16"
        low = [p for p in PARTS if p not in self.bf16_parts]
        once = " (weights once a step)" * self.cache_weights
        return f"{self.recipe} for {', '.join(low) or 'nothing'}{once}; bf16 for {', '.join(self.bf16_parts)}"


def part_of(module: str) -> str | None:
    """The part that a module of the model belongs to, by its name; None for what has no product to quantise."""
    for part, pattern in PARTS.items():
        if re.fullmatch(pattern, module):
            return part
    return None


def precision_of(name: str, bf16_parts: Iterable[str], *, cache_weights: bool = False) -> Precision:
    """From `train.precision`, `train.bf16_parts` and `train.fp8_cache_weights`. Raises ConfigError for a part that does
    not exist or cannot go, and for the switch without FP8."""
    parts = tuple(bf16_parts)
    known = (*PARTS, *NEVER_FP8)
    for part in parts:
        if part not in known:
            near = difflib.get_close_matches(part, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"parts are {', '.join(known)}"
            raise ConfigError(f"train.bf16_parts: {part!r} is no part of the model; {hint}")
    recipe = name if name in RECIPES else None
    missing = [part for part in NEVER_FP8 if part not in parts]
    if recipe is not None and missing:
        raise ConfigError(
            f"train.bf16_parts={list(parts)} leaves out {', '.join(missing)}, which never run in FP8; type "
            f"train.bf16_parts='[{','.join((*parts, *missing))}]'"
        )
    if cache_weights and recipe is None:
        raise ConfigError(
            f"train.fp8_cache_weights=true says how FP8 products quantise, and train.precision={name} has none; type "
            "train.precision=fp8_current, or train.fp8_cache_weights=false"
        )
    return Precision(recipe, parts, cache_weights)


def check_recipe(recipe: str, capability: tuple[int, int], chip: str) -> None:
    """Raises EnvironmentError_ when a GPU of this compute capability cannot run the recipe."""
    needed, generation = RECIPES[recipe]
    if capability >= needed:
        return
    able = [name for name, (least, _) in RECIPES.items() if capability >= least]
    raise EnvironmentError_(
        f"train.precision={recipe} needs compute capability {needed[0]}.{needed[1]} ({generation}), and {chip} has "
        f"{capability[0]}.{capability[1]}; type train.precision={able[0] if able else 'bf16'}"
    )
