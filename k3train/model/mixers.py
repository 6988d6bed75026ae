"""The ladder of sequence mixers that can stand in a K layer: softmax, linear, delta rule, gated delta rule, KDA."""

from __future__ import annotations

from torch import nn

from k3train.errors import ConfigError
from k3train.model.context import ModelContext
from k3train.model.kda import KDA


def make_mixer(ctx: ModelContext, layer: int) -> nn.Module:
    """The module of a K layer for `model.mixer`."""
    if ctx.model.mixer == "kda":
        return KDA(ctx, layer)
    raise ConfigError(f"model.mixer={ctx.model.mixer} is not built yet; use model.mixer=kda")
