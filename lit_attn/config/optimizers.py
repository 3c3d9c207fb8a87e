"""Optimisers."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from lit_attn.schema.base import Kind


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
