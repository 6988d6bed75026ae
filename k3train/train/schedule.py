"""Learning-rate and batch-size schedules as functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from k3train.config.schema import ScheduleConfig
from k3train.errors import ConfigError


def learning_rate(step: int, total: int, peak: float, schedule: ScheduleConfig) -> float:
    """Rate of optimizer step `step` (0-based) of `total`.

    Linear warm-up over warmup_fraction (at least one step), then: cosine to min_lr_ratio * peak (report section 3.2);
    wsd holds the peak and falls linearly over the last decay_fraction; linear falls all the way.
    """
    warmup = max(1, round(schedule.warmup_fraction * total)) if schedule.warmup_fraction > 0 else 0
    if step < warmup:
        return peak * (step + 1) / warmup
    floor = peak * schedule.min_lr_ratio
    progress = (step - warmup) / max(1, total - warmup)
    if schedule.kind == "cosine":
        return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    if schedule.kind == "linear":
        return floor + (peak - floor) * max(0.0, 1.0 - progress)
    if schedule.kind == "wsd":
        start = 1.0 - schedule.decay_fraction
        if progress < start:
            return peak
        return floor + (peak - floor) * max(0.0, (1.0 - progress) / max(schedule.decay_fraction, 1e-9))
    raise ConfigError(f"schedule.kind={schedule.kind!r}; use cosine, wsd or linear")


def global_batch(step: int, full: int, ramp: str | None, multiple: int = 1) -> int:
    """Sequences of step `step`. ramp "start:increment:steps" adds `increment` every `steps` steps up to `full`."""
    if ramp is None:
        return full
    try:
        start, increment, every = (int(x) for x in ramp.split(":"))
    except ValueError:
        raise ConfigError(f"schedule.batch_ramp={ramp!r} is not start:increment:steps; for example 8:8:100") from None
    if start < 1 or increment < 1 or every < 1 or start % multiple or increment % multiple or start > full:
        raise ConfigError(
            f"schedule.batch_ramp={ramp!r}: start and increment must be positive multiples of micro_batch * data = "
            f"{multiple}, and start at most train.global_batch = {full}"
        )
    return min(full, start + increment * (step // every))


def consumed_samples(step: int, full: int, ramp: str | None) -> int:
    """Sequences consumed by the steps before `step`."""
    return step * full if ramp is None else sum(global_batch(s, full, ramp) for s in range(step))
