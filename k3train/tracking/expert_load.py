"""Expert load from routed-token counts: shares and MaxVio.

`counts` is [layers, experts]: how many token-slots each routed expert received (int or float; a list, an array or a
tensor on any device). A load of 1.0 is perfect balance; MaxVio = max_e load_e / mean_e load_e - 1 is the worst
expert's surplus (0 is perfect, 1 means twice its fair part), as in the auxiliary-loss-free balancing literature.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def as_counts(counts: Any) -> np.ndarray:
    """Counts as float64 [layers, experts]; a single layer [experts] gains its axis."""
    if hasattr(counts, "detach"):
        counts = counts.detach().cpu().numpy()
    array = np.asarray(counts, dtype=np.float64)
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(f"expert counts must be [layers, experts], got shape {array.shape}")
    return array


def relative_load(counts: Any) -> np.ndarray:
    """Load of each expert relative to the fair share, float64 [layers, experts]; a layer with no tokens reads 1.0."""
    array = as_counts(counts)
    mean = array.mean(axis=1, keepdims=True)
    return np.where(mean > 0, array / np.where(mean > 0, mean, 1.0), 1.0)


def shares(counts: Any) -> np.ndarray:
    """Fraction of a layer's routed token-slots that each expert received, float64 [layers, experts], rows sum to 1."""
    load = relative_load(counts)
    return load / load.shape[1]


def max_vio_per_layer(counts: Any) -> np.ndarray:
    """MaxVio of each layer, float64 [layers]."""
    return relative_load(counts).max(axis=1) - 1.0


def max_vio(counts: Any) -> float:
    """MaxVio of the worst layer; 0.0 for a model without experts."""
    array = as_counts(counts)
    return float(max_vio_per_layer(array).max()) if len(array) else 0.0


def load_metrics(counts: Any) -> dict[str, Any]:
    """The `moe/*` metrics of one step: relative load as nested lists, MaxVio per layer and of the worst layer."""
    load = relative_load(counts)
    per_layer = load.max(axis=1) - 1.0
    return {
        "moe/load": load.tolist(),
        "moe/max_vio": float(per_layer.max()) if len(per_layer) else 0.0,
        "moe/max_vio_per_layer": per_layer.tolist(),
    }


class ExpertLoadAccumulator:
    """Sums routed-token counts over micro-batches or steps, so that a rarely logged heatmap tells of all of them."""

    def __init__(self) -> None:
        self._sum: np.ndarray | None = None
        self.updates = 0

    def add(self, counts: Any) -> None:
        """Add counts [layers, experts]."""
        array = as_counts(counts)
        if self._sum is not None and self._sum.shape != array.shape:
            raise ValueError(f"expert counts changed shape from {self._sum.shape} to {array.shape}")
        self._sum = array.copy() if self._sum is None else self._sum + array
        self.updates += 1

    def metrics(self, *, reset: bool = True) -> dict[str, Any]:
        """`load_metrics` of everything added since the last reset; empty when nothing was added."""
        if self._sum is None:
            return {}
        metrics = load_metrics(self._sum)
        if reset:
            self._sum, self.updates = None, 0
        return metrics
