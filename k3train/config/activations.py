"""What backward keeps, by class of tensor: the policies of `train.activations`, with `train.recompute` as their preset.

units         products of gated units (experts, shared and dense MLPs)      keep | recompute
gates         gated outputs of KDA and MLA                                  keep | recompute
norms         outputs of norms, and mixes over depth where no kernel fuses  keep | recompute
layer_inputs  what a recomputed layer or unit of layers was given           keep | offload (to host memory)
"""

from __future__ import annotations

from k3train.config.schema import TrainConfig
from k3train.errors import ConfigError

CHEAP = ("units", "gates", "norms")
"""Classes whose tensors are element-wise functions of others: computing them again is almost no work."""

CLASSES = (*CHEAP, "layer_inputs")


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
        again = [name for name in CHEAP if getattr(train.activations, name) == "recompute"]
        if again:
            raise ConfigError(
                f"train.activations.{again[0]}=recompute: train.recompute={train.recompute} already recomputes whole "
                f"layers; type train.activations.{again[0]}=auto"
            )
