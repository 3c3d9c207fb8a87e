"""The learning rate as a pure function of the step."""

import math
from collections.abc import Callable

from lit_attn.config.schedules import (
    Constant,
    Cosine,
    LaggedCosine,
    OneCycle,
    Polynomial,
    Schedule,
    Trapezoid,
)
from lit_attn.schema.errors import ConfigError

Rate = Callable[[int], float]


def learning_rate(schedule: Schedule, peak: float, steps_per_epoch: int, epochs: int) -> Rate:
    """The rate of optimiser step 0, 1, ... as `schedule` says.

    Raises ConfigError where warm-up and warm-down are longer than the training.
    """
    if isinstance(schedule, Constant):
        return lambda step: peak
    if isinstance(schedule, Cosine):
        return _warmed(schedule, peak, steps_per_epoch, epochs, _half_cosine)
    if isinstance(schedule, OneCycle):
        return _warmed(schedule, peak, steps_per_epoch, epochs, _line)
    if isinstance(schedule, Trapezoid):
        return _trapezoid(schedule, peak, steps_per_epoch, epochs)
    if isinstance(schedule, Polynomial):
        return _polynomial(schedule, peak, steps_per_epoch * epochs)
    assert isinstance(schedule, LaggedCosine)
    return _lagged_cosine(schedule, peak, steps_per_epoch, epochs)


def _half_cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def _line(progress: float) -> float:
    return 1 - progress


def _warmed(
    schedule: Cosine | OneCycle,
    peak: float,
    steps_per_epoch: int,
    epochs: int,
    fall: Callable[[float], float],
) -> Rate:
    """Linear up to the peak; then from there to the end as `fall`, from 1 to 0, goes."""
    warmup = round(schedule.warmup * steps_per_epoch)
    total = epochs * steps_per_epoch
    if warmup > total:
        raise ConfigError(f"schedule.warmup: {schedule.warmup} epochs, training has {epochs}")

    def rate(step: int) -> float:
        if step < warmup:
            return schedule.start + (peak - schedule.start) * step / warmup
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return schedule.end + (peak - schedule.end) * fall(progress)

    return rate


def _trapezoid(schedule: Trapezoid, peak: float, steps_per_epoch: int, epochs: int) -> Rate:
    total = epochs * steps_per_epoch
    up = round(schedule.warmup * steps_per_epoch)
    down = round(schedule.warmdown * steps_per_epoch)
    if up + down > total:
        raise ConfigError(
            f"schedule: {schedule.warmup} epochs of warm-up and {schedule.warmdown} of warm-down, "
            f"training has {epochs}"
        )

    def rate(step: int) -> float:
        if step < up:
            return peak * (step + 1) / up
        if step < total - down:
            return peak
        return peak * max(0, total - step) / down if down else peak

    return rate


def _polynomial(schedule: Polynomial, peak: float, total: int) -> Rate:
    def rate(step: int) -> float:
        left = max(0.0, 1 - step / total)
        return schedule.end + (peak - schedule.end) * left**schedule.power

    return rate


def _lagged_cosine(schedule: LaggedCosine, peak: float, steps_per_epoch: int, epochs: int) -> Rate:
    def rate(step: int) -> float:
        epoch = step // steps_per_epoch
        # Epoch 0 runs before the schedule's first step; epoch 1 then sees a negative argument,
        # where the cosine is symmetric.
        if epoch == 0:
            return peak
        share = (1 + math.cos(math.pi * (epoch - schedule.lag) / epochs)) / 2
        return schedule.end + (peak - schedule.end) * share

    return rate
