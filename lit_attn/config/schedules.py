"""Learning-rate schedules: the configuration of each, and the rate as a function of the step."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from lit_attn.schema.base import Kind
from lit_attn.schema.errors import ConfigError

Rate = Callable[[int], float]
"""Learning rate of optimiser step 0, 1, ...; a pure function, so a resumed cell needs no state."""


class Schedule(Kind):
    """Base of the schedules: the learning rate over training."""

    @abstractmethod
    def rate(self, peak: float, steps_per_epoch: int, epochs: int) -> Rate:
        """Return the rate for a training of `epochs` epochs, where `peak` is the optimiser's `lr`.

        Raises ConfigError if the schedule is longer than the training.
        """

    def ramps(self) -> dict[str, float]:
        """Return the epochs that the parts of fixed length take, by key; no epochs are left out."""
        lengths = {name: getattr(self, name, 0.0) for name in ("warmup", "warmdown")}
        return {name: epochs for name, epochs in lengths.items() if epochs}

    def warn(self, epochs: int) -> str | None:
        """Return a warning if a training of `epochs` epochs never leaves the warm-up."""
        if epochs == self.ramps().get("warmup"):
            return f"schedule.warmup takes all {epochs} epochs, the rate only rises to the peak"
        return None


class Constant(Schedule):
    """The peak at every step."""

    kind: Literal["constant"] = "constant"

    def rate(self, peak: float, steps_per_epoch: int, epochs: int) -> Rate:
        """Return a constant function."""
        return lambda step: peak


class WarmUp(Schedule):
    """Base of the schedules that rise linearly from `start` to the peak and then fall to `end`."""

    warmup: float = Field(0.0, ge=0, description="length of the warm-up in epochs")
    start: float = Field(0.0, ge=0, description="learning rate at step 0, if there is a warm-up")
    end: float = Field(0.0, ge=0, description="learning rate after the last step")

    @abstractmethod
    def fall(self, progress: float) -> float:
        """Return the height, from 1 to 0, at `progress` from 0 (end of warm-up) to 1 (the end)."""

    def rate(self, peak: float, steps_per_epoch: int, epochs: int) -> Rate:
        """Return the rate of each step; ConfigError if the warm-up is longer than the training."""
        warmup = round(self.warmup * steps_per_epoch)
        total = epochs * steps_per_epoch
        if warmup > total:
            raise ConfigError(f"schedule.warmup: {self.warmup} epochs, training has {epochs}")

        def rate(step: int) -> float:
            if step < warmup:
                return self.start + (peak - self.start) * step / warmup
            progress = min(1.0, (step - warmup) / max(1, total - warmup))
            return self.end + (peak - self.end) * self.fall(progress)

        return rate


class Cosine(WarmUp):
    """Per step: linear from `start` to the peak over `warmup` epochs, then cosine to `end`."""

    kind: Literal["cosine"] = "cosine"

    def fall(self, progress: float) -> float:
        """Return half a cosine wave."""
        return (1 + math.cos(math.pi * progress)) / 2


class OneCycle(WarmUp):
    """Per step: linear from `start` to the peak over `warmup` epochs, then linear to `end`.

    PyTorch's OneCycleLR with linear annealing, which trained the Long Range Arena's results, goes
    from lr / 25 to lr / 250,000.
    """

    kind: Literal["one-cycle"] = "one-cycle"
    warmup: float = Field(ge=0, description="length of the warm-up in epochs")

    def fall(self, progress: float) -> float:
        """Return a straight line."""
        return 1 - progress


class Polynomial(Schedule):
    """Per step s of S: end + (lr - end) (1 - s / S)^power."""

    kind: Literal["polynomial"] = "polynomial"
    power: PositiveFloat = Field(0.9, description="exponent of the remaining share of steps")
    end: float = Field(0.0, ge=0, description="learning rate after the last step")

    def rate(self, peak: float, steps_per_epoch: int, epochs: int) -> Rate:
        """Return the rate of each step; it stays at `end` after the last one."""
        total = steps_per_epoch * epochs

        def rate(step: int) -> float:
            remaining = max(0.0, 1 - step / total)
            return self.end + (peak - self.end) * remaining**self.power

        return rate


class LaggedCosine(Schedule):
    """Per epoch e: end + (lr - end) (1 + cos(pi (e - lag) / epochs)) / 2, and the peak in epoch 0.

    A set-up that calls its schedule with `epoch` after the epoch lags by one (DeiT); the set-up of
    ViT-small on CIFAR calls it with epoch - 1 and lags by two (docs/setups.md).
    """

    kind: Literal["lagged-cosine"] = "lagged-cosine"
    lag: NonNegativeInt = Field(2, description="epochs by which the cosine lags")
    end: float = Field(0.0, ge=0, description="learning rate at the end of the cosine")

    def rate(self, peak: float, steps_per_epoch: int, epochs: int) -> Rate:
        """Return the rate of each step, which is constant within an epoch."""

        def rate(step: int) -> float:
            epoch = step // steps_per_epoch
            # Epoch 0 runs before the schedule's first call. Epoch 1 then has a negative argument,
            # for which the cosine is symmetric.
            if epoch == 0:
                return peak
            share = (1 + math.cos(math.pi * (epoch - self.lag) / epochs)) / 2
            return self.end + (peak - self.end) * share

        return rate


class Trapezoid(Schedule):
    """Per step: linear up to the peak over `warmup` epochs, constant, linear to 0 over `warmdown`.

    Step s of S has the rate lr min(1, (s + 1) / warm-up steps, (S - s) / warm-down steps), as in
    modded-nanogpt (docs/setups.md).
    """

    kind: Literal["trapezoid"] = "trapezoid"
    warmup: float = Field(0.0, ge=0, description="length of the warm-up in epochs")
    warmdown: float = Field(
        0.0, ge=0, description="length of the decay at the end of training in epochs"
    )

    def rate(self, peak: float, steps_per_epoch: int, epochs: int) -> Rate:
        """Return the rate of each step; ConfigError if the ramps are longer than the training."""
        total = epochs * steps_per_epoch
        up = round(self.warmup * steps_per_epoch)
        down = round(self.warmdown * steps_per_epoch)
        if up + down > total:
            raise ConfigError(
                f"schedule: {self.warmup} epochs of warm-up and {self.warmdown} of warm-down, "
                f"training has {epochs}"
            )

        def rate(step: int) -> float:
            if step < up:
                return peak * (step + 1) / up
            if step < total - down:
                return peak
            return peak * max(0, total - step) / down if down else peak

        return rate
