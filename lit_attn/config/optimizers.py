"""Optimisers: the configuration of each, and how it is built over the parameters of a module."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat

from lit_attn.schema.base import Kind, load

if TYPE_CHECKING:
    import torch
    from torch import nn


class Optimizer(Kind):
    """Base of the optimisers."""

    lr: PositiveFloat = Field(description="peak learning rate, which the schedule scales")
    weight_decay: float = Field(0.0, ge=0, description="weight-decay coefficient")

    @abstractmethod
    def build(self, module: "nn.Module", fused: bool = True) -> "torch.optim.Optimizer":
        """Return the optimiser over the trainable parameters of `module`.

        `fused` asks for one kernel for all parameters, if the optimiser has such a kernel.
        """


class SGD(Optimizer):
    """Gradient descent with Nesterov's momentum, as timm's "sgd"; weight decay is coupled (L2)."""

    kind: Literal["sgd"] = "sgd"
    momentum: float = Field(0.9, gt=0, lt=1, description="decay of the momentum")

    def build(self, module: "nn.Module", fused: bool = True) -> "torch.optim.Optimizer":
        """Return torch.optim.SGD with Nesterov's momentum."""
        from torch.optim import SGD as TorchSGD

        parameters = _trainable_parameters(module)
        return TorchSGD(
            parameters,
            self.lr,
            self.momentum,
            weight_decay=self.weight_decay,
            nesterov=True,
            fused=fused,
        )


Decay = Annotated[float, Field(ge=0, lt=1)]


class Adaptive(Optimizer):
    """Base of the optimisers that divide by a running mean of squared gradients."""

    betas: tuple[Decay, Decay] = Field(
        (0.9, 0.999), description="decays of the means of gradients and of their squares"
    )


class Adam(Adaptive):
    """Adam (Kingma & Ba 2015); weight decay is coupled (L2)."""

    kind: Literal["adam"] = "adam"
    eps: PositiveFloat = Field(1e-8, description="added to the root of the mean square")

    def build(self, module: "nn.Module", fused: bool = True) -> "torch.optim.Optimizer":
        """Return torch.optim.Adam."""
        from torch.optim import Adam as TorchAdam

        parameters = _trainable_parameters(module)
        return TorchAdam(parameters, self.lr, self.betas, self.eps, self.weight_decay, fused=fused)


class AdamW(Adaptive):
    """AdamW (Loshchilov & Hutter 2019): weight decay is decoupled from the gradient."""

    kind: Literal["adamw"] = "adamw"
    eps: PositiveFloat = Field(1e-8, description="added to the root of the mean square")
    decay: Literal["all", "matrices", "weights"] = Field(
        "all",
        description="parameters with weight decay: all; matrices: tensors of 2 or more axes; "
        "weights: the same without positions and class token, as timm",
    )

    def build(self, module: "nn.Module", fused: bool = True) -> "torch.optim.Optimizer":
        """Return torch.optim.AdamW with the groups that `decay` describes."""
        from torch.optim import AdamW as TorchAdamW

        parameters = _trainable_parameters(module)
        if self.decay == "weights":
            from timm.models.vision_transformer import VisionTransformer
            from timm.optim import param_groups_weight_decay

            names = module.no_weight_decay() if isinstance(module, VisionTransformer) else ()
            groups = param_groups_weight_decay(
                module, self.weight_decay, no_weight_decay_list=names
            )
        else:
            matrices = [p for p in parameters if p.ndim >= 2]
            others = [p for p in parameters if p.ndim < 2]
            others_decay = 0.0 if self.decay == "matrices" else self.weight_decay
            groups = [
                {"params": matrices, "weight_decay": self.weight_decay},
                {"params": others, "weight_decay": others_decay},
            ]
        return TorchAdamW(groups, self.lr, self.betas, self.eps, fused=fused)


class SetAdam(Adaptive):
    """SET-Adam (Zhang 2024): Adam with a suppressed range of adaptive step sizes."""

    kind: Literal["set-adam"] = "set-adam"
    eps: PositiveFloat = Field(1e-18, description="added to the mean square, in the root")
    tau: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="share of a tensor's smallest divisor to subtract",
    )

    def build(self, module: "nn.Module", fused: bool = True) -> "torch.optim.Optimizer":
        """Return lit_attn's SET-Adam, which is always a few kernels."""
        build = load("lit_attn.optim.set_adam:SETAdam")
        parameters = _trainable_parameters(module)
        optimizer: torch.optim.Optimizer = build(
            parameters, self.lr, self.betas, self.eps, self.tau, self.weight_decay
        )
        return optimizer


def _trainable_parameters(module: "nn.Module") -> "list[nn.Parameter]":
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
