"""What backward keeps, by class of tensor: the policies of `train.activations`, with `train.recompute` as their preset.

units         products of gated units (experts, shared and dense MLPs)      keep | recompute | fp8
gates         gated outputs of KDA and MLA                                  keep | recompute | fp8
norms         outputs of norms, and mixes over depth where no kernel fuses  keep | recompute
layer_inputs  what a recomputed layer or unit of layers was given           keep | offload (to host memory)

fp8 keeps what backward reads of a class in E4M3, a scale for 128 values of a row. Of a gated unit that is 3.1 bytes a value
of its width instead of 6 (keep, bf16) or 4 (recompute). The forward is untouched; gradients are rounded.
"""

from __future__ import annotations

from k3train.config.schema import TrainConfig
from k3train.errors import ConfigError

CHEAP = ("units", "gates", "norms")
"""Classes whose tensors are element-wise functions of others: computing them again is almost no work."""

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


def check_activations(train: TrainConfig) -> None:
    """Raises ConfigError for a policy that would do nothing."""
    if train.activations.layer_inputs == "offload" and train.recompute not in ("full", "unit"):
        raise ConfigError(
            f"train.activations.layer_inputs=offload moves what recomputed layers were given, and "
            f"train.recompute={train.recompute} recomputes none; type train.recompute=full"
        )
    if train.recompute in ("full", "unit"):
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
