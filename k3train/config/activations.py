"""What backward keeps, by class of tensor: the policies of `train.activations`, with `train.recompute` as their preset.

units         products of gated units (experts, shared and dense MLPs)      keep | recompute | fp8
gates         gated outputs of KDA and MLA                                  keep | recompute | fp8
norms         outputs of norms, and mixes over depth where no kernel fuses  keep | recompute
layer_inputs  what a recomputed layer or unit of layers was given           keep | offload (to host memory)

fp8 keeps what backward reads of a class in E4M3, a scale for 128 values of a row. Of a gated unit that is 3.1 bytes a value
of its width instead of 6 (keep, bf16) or 4 (recompute). The forward is untouched; gradients are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

from k3train.config.schema import TrainConfig
from k3train.errors import ConfigError

CHEAP = ("units", "gates", "norms")
"""Classes whose tensors are element-wise functions of others: computing them again is almost no work."""

WHOLE_LAYERS = {"full": 1, "unit": 4}
"""Values of `train.recompute` that compute whole layers again, and of how many layers their regions are."""

CLASSES = (*CHEAP, "layer_inputs")


REFUSED = {
    "train.activations.layer_inputs=fp8": (
        "a layer recomputed from a rounded input would route tokens to other experts than its forward did, and its "
        "gradients would be of another function; type train.activations.layer_inputs=offload"
    ),
    "train.activations.norms=fp8": (
        "their inputs and outputs are held by the sublayers beside them too, so that copies would take more memory, not "
        "less; type train.activations.norms=recompute"
    ),
}
"""Policies that one could think of, and why they are not."""


def policies(train: TrainConfig) -> dict[str, str]:
    """The policy of every class. What `train.activations` leaves at auto follows `train.recompute`."""
    cheap = "recompute" if train.recompute == "selective" else "keep"
    preset = dict.fromkeys(CHEAP, cheap) | {"layer_inputs": "keep"}
    asked = {name: getattr(train.activations, name) for name in CLASSES}
    return {name: preset[name] if policy == "auto" else policy for name, policy in asked.items()}


def computed_again(recompute: str, below: int | None, layer: int) -> bool:
    """Whether the backward runs the whole forward of the layer of this global index again; below: as in `regions`."""
    return recompute in WHOLE_LAYERS and (below is None or layer < below)


def regions(recompute: str, below: int | None, layers: Sequence[int]) -> list[tuple[bool, list[int]]]:
    """How these layers (global indices, ascending) run: regions in order, and whether the backward computes each again.

    Regions are of one layer (full) or of a unit cut at global multiples of four; layers from index `below` on (None: no
    layer) are no region's and run one by one.
    """
    size = WHOLE_LAYERS.get(recompute, 0)
    found: list[tuple[bool, list[int]]] = []
    for layer in layers:
        again = computed_again(recompute, below, layer)
        if again and found and found[-1][1][-1] // size == layer // size:
            found[-1][1].append(layer)
        else:
            found.append((again, [layer]))
    return found


def check_recompute(train: TrainConfig, layers: int) -> None:
    """Raises ConfigError where `train.recompute_layers` does not cut a model of this many layers."""
    below = train.recompute_layers
    if below is None:
        return
    what, size = f"train.recompute_layers={below}", WHOLE_LAYERS.get(train.recompute)
    if size is None:
        raise ConfigError(
            f"{what} says how many layers train.recompute=full or unit computes again, and "
            f"train.recompute={train.recompute} does so with none; type train.recompute=unit, or "
            "train.recompute_layers=null"
        )
    if below < 1:
        raise ConfigError(
            f"{what} computes no layer again; type train.recompute=none train.recompute_layers=null, or at least "
            f"train.recompute_layers={min(size, layers)}"
        )
    if below > layers:
        raise ConfigError(
            f"{what} exceeds the {layers} layers of model.pattern; type train.recompute_layers=null, which is all"
        )
    if below % size and below != layers:
        near = [n for n in (below // size * size, min(below // size * size + size, layers)) if n]
        raise ConfigError(
            f"{what} cuts a unit of {size} layers, which train.recompute={train.recompute} computes again as a whole; "
            "type " + " or ".join(f"train.recompute_layers={n}" for n in near)
        )


def check_activations(train: TrainConfig) -> None:
    """Raises ConfigError for a policy that would do nothing."""
    if train.activations.layer_inputs == "offload" and train.recompute not in WHOLE_LAYERS:
        raise ConfigError(
            f"train.activations.layer_inputs=offload moves what recomputed layers were given, and "
            f"train.recompute={train.recompute} recomputes none; type train.recompute=full"
        )
    if train.recompute in WHOLE_LAYERS:
        asked = {name: getattr(train.activations, name) for name in CHEAP}
        again = [name for name, policy in asked.items() if policy in ("recompute", "fp8")]
        if again:
            raise ConfigError(
                f"train.activations.{again[0]}={asked[again[0]]}: train.recompute={train.recompute} already recomputes "
                f"whole layers; type train.activations.{again[0]}=auto"
            )
    if train.precision == "fp32" and "fp8" in (train.activations.units, train.activations.gates):
        raise ConfigError(
            "train.activations keeps tensors in fp8 and train.precision=fp32 asks for exact gradients; type "
            "train.precision=bf16, or keep in their place"
        )
