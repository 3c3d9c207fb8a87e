"""Learning-rate schedules: the configuration of each, and the rate as a function of the step."""

import math
import re
from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from lit_attn.schema.base import Kind, Share, must_be

Rate = Callable[[int], float]
"""Learning rate of optimiser step 0, 1, ...; a pure function, so a resumed cell needs no state."""

STEPS = re.compile(r"(\d+) steps?")
"""Text of a length in steps."""

Warmup = Annotated[
    float | str,
    must_be(
        lambda length: STEPS.fullmatch(length) if isinstance(length, str) else length >= 0,
        "epochs, as 0.5, or steps, as '200 steps'",
    ),
    Field(description="length of the warm-up in epochs, or in steps, as `200 steps`"),
]
Start = Annotated[float, Field(ge=0, description="learning rate at step 0, if there is a warm-up")]
End = Annotated[float, Field(ge=0, description="learning rate after the last step")]


def count_steps(warmup: float | str, steps_per_epoch: int) -> int:
    """Return the steps of a warm-up, whose length is in epochs unless it says steps."""
    if isinstance(warmup, str):
        return int(warmup.split()[0])
    return round(warmup * steps_per_epoch)


class Schedule(Kind):
    """Base of the schedules: the learning rate over training."""

    @abstractmethod
    def rate_at(self, step: int, peak: float, steps_per_epoch: int, epochs: int) -> float:
        """Return the rate of optimiser step 0, 1, ..., where `peak` is the optimiser's `lr`.

        An experiment refuses a training of fewer epochs than the `ramps` take.
        """

    def rate(self, peak: float, steps_per_epoch: int, epochs: int) -> Rate:
        """Return the rate as a function of the step."""
        return lambda step: self.rate_at(step, peak, steps_per_epoch, epochs)

    def momentum(self, steps_per_epoch: int, epochs: int) -> Rate | None:
        """Return the momentum (Adam's beta1) of each step, or None if the optimiser's is kept."""
        return None

    def weight_decay(self, steps_per_epoch: int, epochs: int) -> Rate | None:
        """Return the factor of the weight decay in each step, or None if it does not change."""
        return None

    def try_out(self, signature: Any) -> None:
        ramp_epochs = math.ceil(sum(self.ramps().values()))
        float(self.rate_at(0, 1.0, 10, ramp_epochs + 1))

    def ramps(self) -> dict[str, float]:
        """Return the epochs that the parts of fixed length take, by key.

        A part of no epochs is left out, and so is a warm-up in steps, whose epochs depend on the
        data.
        """
        ramps = {}
        for name in ("warmup", "warmdown"):
            epochs = getattr(self, name, 0.0)
            if epochs and not isinstance(epochs, str):
                ramps[name] = epochs
        return ramps

    def rising_steps(self, steps_per_epoch: int) -> int:
        """Return the number of steps of the warm-up, after which the rate has its peak."""
        return count_steps(getattr(self, "warmup", 0.0), steps_per_epoch)

    def warn_of_steps(self, steps: int, steps_per_epoch: int) -> str | None:
        """Return a warning if a training of `steps` steps, not stretched, ends in the warm-up."""
        rising = self.rising_steps(steps_per_epoch)
        if steps > rising or not rising:
            return None
        return (
            f"the training ends after {steps:,} steps and the warm-up takes {rising:,}, so the "
            "learning rate only rises; shorten the warm-up, or raise training.epochs or "
            "training.max_steps"
        )

    def warn(self, epochs: int) -> str | None:
        """Return a warning if a training of `epochs` epochs never leaves the warm-up."""
        if epochs != self.ramps().get("warmup"):
            return None
        return (
            f"schedule.warmup takes all {epochs} epochs, so the rate only rises;"
            " shorten it or raise training.epochs"
        )


class Constant(Schedule, kind="constant"):
    """The peak at every step."""

    def rate_at(self, step: int, peak: float, steps_per_epoch: int, epochs: int) -> float:
        return peak


class Cosine(Schedule, kind="cosine"):
    """Per step: linear from `start` to the peak over `warmup` epochs, then cosine to `end`."""

    warmup: Warmup = 0.0
    start: Start = 0.0
    end: End = 0.0

    def rate_at(self, step: int, peak: float, steps_per_epoch: int, epochs: int) -> float:
        total = steps_per_epoch * epochs
        warmup = count_steps(self.warmup, steps_per_epoch)
        if step < warmup:
            return self.start + (peak - self.start) * step / warmup
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return self.end + (peak - self.end) * (1 + math.cos(math.pi * progress)) / 2


class InverseSquareRoot(Schedule, kind="inverse-sqrt"):
    """Per step s: linear from `start` to the peak in W steps, then peak sqrt(W / s), as fairseq."""

    warmup_steps: PositiveInt = Field(4000, description="length W of the warm-up in steps")
    start: Start = 0.0

    def rising_steps(self, steps_per_epoch: int) -> int:
        return self.warmup_steps

    def rate_at(self, step: int, peak: float, steps_per_epoch: int, epochs: int) -> float:
        if step < self.warmup_steps:
            return self.start + (peak - self.start) * step / self.warmup_steps
        return peak * math.sqrt(self.warmup_steps / step)


class OneCycle(Schedule, kind="one-cycle"):
    """Linear from `start` to the peak, then linear to `end`, as PyTorch's OneCycleLR.

    With S steps, w of them warm-up, step w - 1 has the peak and step S - 1 the rate `end`. The
    momentum (Adam's beta1) moves the other way. The Long Range Arena's results are trained by it,
    from lr / 25 to lr / 250,000.
    """

    warmup: Warmup
    start: Start = 0.0
    end: End = 0.0
    cycle: tuple[Share, Share] | None = Field(
        (0.95, 0.85),
        description="momentum (Adam's beta1) at both ends and at the peak; null: the optimiser's",
    )

    def rate_at(self, step: int, peak: float, steps_per_epoch: int, epochs: int) -> float:
        return self._triangle((self.start, peak, self.end), step, steps_per_epoch, epochs)

    def momentum(self, steps_per_epoch: int, epochs: int) -> Rate | None:
        if self.cycle is None:
            return None
        ends, peak = self.cycle
        return lambda step: self._triangle((ends, peak, ends), step, steps_per_epoch, epochs)

    def _triangle(
        self, values: tuple[float, float, float], step: int, steps_per_epoch: int, epochs: int
    ) -> float:
        """Return the value of a step on the lines through `values`: first, peak and last."""
        first, peak, last = values
        total = steps_per_epoch * epochs
        warmup = count_steps(self.warmup, steps_per_epoch)
        top = warmup - 1
        if step < top:
            return first + (peak - first) * step / top
        progress = min(1.0, (step - top) / max(1, total - warmup))
        return peak + (last - peak) * progress


class LaggedCosine(Schedule, kind="lagged-cosine"):
    """Per epoch e: end + (lr - end) (1 + cos(pi (e - lag) / epochs)) / 2, and the peak in epoch 0.

    A set-up that calls its schedule with `epoch` after the epoch lags by one (DeiT); the set-up of
    ViT-small on CIFAR calls it with epoch - 1 and lags by two.
    Sources: github.com/kentaroy47/vision-transformers-cifar10 (docs/setups.md, section 1) and
    github.com/BorealisAI/efficient-vit-training (section 5).
    """

    lag: NonNegativeInt = Field(2, description="epochs by which the cosine lags")
    end: End = 0.0

    def rate_at(self, step: int, peak: float, steps_per_epoch: int, epochs: int) -> float:
        epoch = step // steps_per_epoch
        # Epoch 0 runs before the first call. The argument of epoch 1 is negative: cos(-x) = cos(x).
        if epoch == 0:
            return peak
        share = (1 + math.cos(math.pi * (epoch - self.lag) / epochs)) / 2
        return self.end + (peak - self.end) * share


class Polynomial(Schedule, kind="polynomial"):
    """Per step s of S: end + (lr - end) (1 - s / S)^power."""

    power: PositiveFloat = Field(0.9, description="exponent of the remaining share of steps")
    end: End = 0.0

    def rate_at(self, step: int, peak: float, steps_per_epoch: int, epochs: int) -> float:
        remaining = max(0.0, 1 - step / (steps_per_epoch * epochs))
        return self.end + (peak - self.end) * remaining**self.power


class Trapezoid(Schedule, kind="trapezoid"):
    """Per step: linear up to the peak over `warmup` epochs, constant, linear to 0 over `warmdown`.

    Step s of S has the rate lr min(1, (s + 1) / warm-up steps, (S - s) / warm-down steps), as in
    modded-nanogpt (docs/setups.md). Both ramps have fixed lengths, so trainings of different length
    are equal until the decay of the shorter one (Hägele et al., "Scaling Laws and Compute-Optimal
    Training Beyond Fixed Training Durations", arXiv:2405.18392, section 3).
    """

    warmup: Warmup = 0.0
    warmdown: float = Field(0.0, ge=0, description="length of the decay at the end in epochs")

    def rate_at(self, step: int, peak: float, steps_per_epoch: int, epochs: int) -> float:
        total = epochs * steps_per_epoch
        rising_steps = count_steps(self.warmup, steps_per_epoch)
        falling_steps = round(self.warmdown * steps_per_epoch)
        rise = (step + 1) / rising_steps if rising_steps else 1.0
        fall = max(0, total - step) / falling_steps if falling_steps else 1.0
        return peak * min(1.0, rise, fall)


def stretch(rate: Rate, factor: float) -> Rate:
    """Return `rate` for a training with `factor` times the steps.

    Step s has the rate of step floor((s + 1/2) / factor) of the original training: the middle of a
    step decides, so a factor near 1 shifts no step.
    """
    if factor == 1:
        return rate
    return lambda step: rate(int((step + 0.5) / factor))


def set_constants(
    groups: list[dict[str, Any]],
    step: int,
    rate: Rate,
    momentum: Rate | None = None,
    decay_factor: Rate | None = None,
) -> None:
    """Set the rate, the momentum and the weight decay of `step` in groups of parameters.

    Momentum and weight decay stay those of the optimiser without a function of them.
    """
    for group in groups:
        # Optimisers of different parameters can have different rates.
        group["lr"] = rate(step) * group.get("lr_scale", 1.0)
        if group.get("keeps_constants"):
            # Momentum and weight decay of the schedule are those of other parameters.
            continue
        if decay_factor is not None:
            first_decay = group.setdefault("first_weight_decay", group["weight_decay"])
            group["weight_decay"] = first_decay * decay_factor(step)
        if momentum is None:
            continue
        if "betas" in group:
            _, beta2 = group["betas"]
            group["betas"] = (momentum(step), beta2)
        elif "momentum" in group:
            group["momentum"] = momentum(step)
