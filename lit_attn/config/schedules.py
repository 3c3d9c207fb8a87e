"""Learning-rate schedules."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from lit_attn.schema.base import Kind


class Schedule(Kind):
    """The learning rate over training."""


class Constant(Schedule):
    kind: Literal["constant"] = "constant"


class Cosine(Schedule):
    """Per step: linear from `start` to the peak over `warmup` epochs, then cosine to `end`."""

    kind: Literal["cosine"] = "cosine"
    warmup: float = Field(0.0, ge=0, description="epochs")
    start: float = Field(0.0, ge=0, description="learning rate at step 0 where there is a warm-up")
    end: float = Field(0.0, ge=0, description="learning rate after the last step")


class OneCycle(Schedule):
    """Per step: linear from `start` to the peak over `warmup` epochs, then linear to `end`.

    PyTorch's OneCycleLR with linear annealing, which the Long Range Arena's results are trained by,
    goes from lr / 25 to lr / 250,000.
    """

    kind: Literal["one-cycle"] = "one-cycle"
    warmup: float = Field(ge=0, description="epochs")
    start: float = Field(0.0, ge=0, description="learning rate at step 0 where there is a warm-up")
    end: float = Field(0.0, ge=0, description="learning rate after the last step")


class Polynomial(Schedule):
    """Per step s of S: end + (lr - end) (1 - s / S)^power."""

    kind: Literal["polynomial"] = "polynomial"
    power: PositiveFloat = 0.9
    end: float = Field(0.0, ge=0, description="learning rate after the last step")


class LaggedCosine(Schedule):
    """Per epoch e: end + (lr - end) (1 + cos(pi (e - lag) / epochs)) / 2, epoch 0 the peak.

    A set-up that steps its schedule with `epoch` after the epoch lags by one, as DeiT's does; that
    of ViT-small on CIFAR steps with epoch - 1, and lags by two (setups in docs/setups.md).
    """

    kind: Literal["lagged-cosine"] = "lagged-cosine"
    lag: NonNegativeInt = 2
    end: float = Field(0.0, ge=0, description="learning rate at the end of the curve")


class Trapezoid(Schedule):
    """Per step: linear up to the peak over `warmup` epochs, constant, linear to 0 over `warmdown`.

    Step s of S has the rate lr min(1, (s + 1) / warm-up steps, (S - s) / warm-down steps), as in
    modded-nanogpt (docs/setups.md).
    """

    kind: Literal["trapezoid"] = "trapezoid"
    warmup: float = Field(0.0, ge=0, description="epochs")
    warmdown: float = Field(0.0, ge=0, description="epochs, the last ones")
