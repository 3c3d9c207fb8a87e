"""Optimisers, schedules, and how long and how precisely a cell trains."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from lit_attn.config.base import Config, Kind, outside_identity
from lit_attn.config.diagnostics import Diagnostics


class Optimizer(Kind):
    """Base of the optimisers; `lr` is the peak that a schedule scales."""

    lr: PositiveFloat
    weight_decay: float = Field(0.0, ge=0)


class SGD(Optimizer):
    """Gradient descent with Nesterov's momentum, as in timm's "sgd"; weight decay is coupled L2."""

    kind: Literal["sgd"] = "sgd"
    momentum: float = Field(0.9, gt=0, lt=1)


Decay = Annotated[float, Field(ge=0, lt=1)]


class Adaptive(Optimizer):
    """Those that divide by a running mean of squares; `betas` are the decays of both means."""

    betas: tuple[Decay, Decay] = (0.9, 0.999)


class Adam(Adaptive):
    """Adam (Kingma & Ba 2015); weight decay is coupled L2."""

    kind: Literal["adam"] = "adam"
    eps: PositiveFloat = 1e-8


class AdamW(Adaptive):
    """AdamW (Loshchilov & Hutter 2019).

    `decay: matrices` spares tensors of fewer than 2 axes, `decay: weights` the positions and the
    class token of a vision transformer too, as timm does.
    """

    kind: Literal["adamw"] = "adamw"
    eps: PositiveFloat = 1e-8
    decay: Literal["all", "matrices", "weights"] = "all"


class SetAdam(Adaptive):
    """SET-Adam (Zhang 2024): Adam with suppressed range of adaptive step sizes per tensor."""

    kind: Literal["set-adam"] = "set-adam"
    eps: PositiveFloat = 1e-18
    tau: float = Field(0.5, ge=0, lt=1)


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


class Training(Config):
    """Length and precision of a cell's training; where its device and speed switches stand."""

    epochs: PositiveInt
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    clip: PositiveFloat | None = Field(None, description="gradient norm")
    max_steps: PositiveInt | None = Field(None, description="stop after this many steps")
    evaluate_every: PositiveInt = Field(1, description="epochs between evaluations")
    ema: float | None = Field(
        None, gt=0, lt=1, description="decay of an average of the weights, evaluated beside them"
    )
    compile: bool = outside_identity(False, "torch.compile the model")
    accelerator: Literal["auto", "cpu", "cuda"] = outside_identity("auto", "where to train")
    devices: PositiveInt = outside_identity(1, "that share every batch (DDP)")
    checkpoint_every: PositiveFloat = outside_identity(60.0, "seconds between checkpoints")
    diagnostics: Diagnostics | None = outside_identity(None, "what to record of attention layers")
