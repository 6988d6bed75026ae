"""How far a quantised matrix is from its original: the numbers that a report shows, and the ones that betray a bug.

Cosine similarity is left out on purpose: a scale error of a factor 4 leaves it unchanged, while the norm ratio
reads 0.25.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from k3train.weights.mxfp4 import GROUP, Packed, exponent_value, unpack

# Round-to-nearest reads 19.0 dB on Gaussian weights and 17 dB on a Student t with 3 degrees of freedom.
SQNR_FLOOR_DB = 15.0
NORM_RATIO_RANGE = (0.98, 1.01)
_ROWS = 1 << 20  # elements per pass


@dataclass
class Quality:
    """Sums over one matrix, or over many after `add`; the properties are what is reported."""

    elements: int = 0
    signal: float = 0.0  # sum of w**2
    noise: float = 0.0  # sum of (q - w)**2
    energy: float = 0.0  # sum of q**2
    zeros: int = 0  # codes 0 and 8
    clipped: int = 0  # |w| beyond 6 scales: stored as the largest code
    groups: int = 0
    dead_groups: int = 0  # groups whose codes are all zero
    scale_histogram: dict[int, int] = field(default_factory=dict)

    def add(self, other: Quality) -> None:
        """Pool another matrix into this one."""
        for name in ("elements", "signal", "noise", "energy", "zeros", "clipped", "groups", "dead_groups"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for byte, count in other.scale_histogram.items():
            self.scale_histogram[byte] = self.scale_histogram.get(byte, 0) + count

    @property
    def sqnr_db(self) -> float:
        """Signal to quantisation-noise ratio in dB; infinite when the values are exact."""
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    @property
    def norm_ratio(self) -> float:
        """|Q| / |W|; 1.0 for an all-zero matrix that stayed zero."""
        if self.signal == 0:
            return 1.0 if self.energy == 0 else math.inf
        return math.sqrt(self.energy / self.signal)

    @property
    def suspicious(self) -> str | None:
        """Why these numbers look like a bug rather than like 4 bits, or None."""
        low, high = NORM_RATIO_RANGE
        if not low <= self.norm_ratio <= high:
            return f"norm ratio {self.norm_ratio:.3f} outside [{low}, {high}]"
        if self.sqnr_db < SQNR_FLOOR_DB:
            return f"SQNR {self.sqnr_db:.1f} dB below {SQNR_FLOOR_DB} dB"
        return None

    def as_dict(self) -> dict[str, object]:
        """JSON form; an exact matrix has ``sqnr_db: null``."""
        sqnr = self.sqnr_db
        bytes_used = sorted(self.scale_histogram)
        return {
            "sqnr_db": round(sqnr, 4) if math.isfinite(sqnr) else None,
            "norm_ratio": round(self.norm_ratio, 6),
            "zero_share": self.zeros / max(self.elements, 1),
            "clipped_share": self.clipped / max(self.elements, 1),
            "dead_groups": self.dead_groups,
            "groups": self.groups,
            "scale_min": bytes_used[0] if bytes_used else None,
            "scale_max": bytes_used[-1] if bytes_used else None,
            "scale_histogram": {str(b): self.scale_histogram[b] for b in bytes_used},
            "suspicious": self.suspicious,
        }


def measure(weight: Tensor, quantised: Packed) -> Quality:
    """Compare ``weight`` [..., out, in] with its quantised form. Sums are in float64 and taken in bounded pieces."""
    width = weight.shape[-1]
    rows = weight.detach().reshape(-1, width)
    packed, scale = quantised.packed.view(-1, width // 2), quantised.scale.view(-1, width // GROUP)
    result = Quality(elements=weight.numel(), groups=scale.numel())
    counts = torch.bincount(scale.flatten().int(), minlength=256).tolist()
    result.scale_histogram = {byte: n for byte, n in enumerate(counts) if n}
    step = max(1, _ROWS // width)
    for i in range(0, len(rows), step):
        part = rows[i : i + step].float()
        piece = Packed(packed[i : i + step], scale[i : i + step])
        value = piece.dequantise(torch.float32)
        result.signal += part.double().square().sum().item()
        result.noise += (value.double() - part.double()).square().sum().item()
        result.energy += value.double().square().sum().item()
        zero = (unpack(piece.packed) & 7) == 0
        result.zeros += int(zero.sum())
        result.dead_groups += int(zero.unflatten(-1, (-1, GROUP)).all(-1).sum())
        limit = 6 * exponent_value(piece.scale)
        result.clipped += int((part.abs().unflatten(-1, (-1, GROUP)) > limit.unsqueeze(-1)).sum())
    return result
