"""Optimisers of torch and timm with one rule for all parameters, and those of a user.

Sources: Lion, Chen et al. 2023, https://arxiv.org/abs/2302.06675; Adafactor, Shazeer & Stern 2018,
https://arxiv.org/abs/1804.04235.
"""

import inspect
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import nn

from lit_attn.optim.base import Optimizer, find_declared
from lit_attn.schema.base import OwnClass, Share
from lit_attn.schema.errors import ConfigError


class SGD(Optimizer, kind="sgd"):
    """Gradient descent with Nesterov's momentum, as timm's "sgd"; weight decay is coupled (L2)."""

    is_recordable = True
    momentum: float = Field(0.9, gt=0, lt=1, description="decay of the momentum")

    def build(self, module: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.grouped_parameters(module),
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=True,
            fused=fused,
        )


class Adaptive(Optimizer):
    """Base of the optimisers that divide by a running mean of squared gradients."""

    fuses_shards = True
    target: ClassVar[Any]
    """Class of the optimiser."""

    betas: tuple[Share, Share] = Field(
        (0.9, 0.999), description="decays of the means of gradients and of their squares"
    )
    eps: PositiveFloat = Field(1e-8, description="added to the root of the mean square")

    def build(self, module: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.target(
            self.grouped_parameters(module),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=fused,
        )
        return optimizer


class Adam(Adaptive, kind="adam"):
    """Adam (Kingma & Ba 2015); weight decay is coupled (L2)."""

    target = torch.optim.Adam
    is_recordable = True


class AdamW(Adaptive, kind="adamw"):
    """AdamW (Loshchilov & Hutter 2019): weight decay is decoupled from the gradient."""

    target = torch.optim.AdamW
    is_recordable = True
    has_width_rates = True
    decay: Literal["all", "matrices", "weights"] = Field(
        "all",
        description="parameters with weight decay: all; matrices: tensors of 2 or more axes, as "
        "nanoGPT; weights: the same without positions, class tokens, scales and priors, as timm",
    )

    def parameters(self, module: nn.Module) -> list[Any]:
        """Return two groups: matrices and vectors, or for `weights` first those without decay.

        Vectors that are stored as the rows of one tensor are vectors.
        """
        exempt = find_declared(module, "stacked_vectors")
        if self.decay == "weights":
            exempt |= find_declared(module, "no_weight_decay")
        matrices = []
        vectors = []
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            is_exempt = any(fnmatchcase(name, pattern) for pattern in exempt)
            is_vector = parameter.ndim < 2 or is_exempt
            is_bias = self.decay == "weights" and name.endswith(".bias")
            if is_vector or is_bias:
                vectors.append(parameter)
            else:
                matrices.append(parameter)
        vector_decay = self.weight_decay if self.decay == "all" else 0.0
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": vector_decay}]
        if self.decay == "weights":
            groups.reverse()
        return groups


class Lion(Optimizer, kind="lion"):
    """Lion (Chen et al. 2023), of timm: steps of the sign of a momentum, decoupled weight decay."""

    is_recordable = True
    betas: tuple[Share, Share] = Field(
        (0.9, 0.99), description="shares of the momentum in a step, and decay of the momentum"
    )

    def build(self, module: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
        from timm.optim import Lion as TimmLion

        parameters = self.grouped_parameters(module)
        return TimmLion(parameters, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)


class Adafactor(Optimizer, kind="adafactor"):
    """Adafactor (Shazeer & Stern 2018), of torch: mean squares of rows and of columns alone.

    The step of a tensor is scaled by the root mean square of the tensor, so `lr` is relative.
    """

    # torch's code changes norms of rows and columns in place, which those of shards do not allow.
    takes_shards = False

    def build(self, module: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(
            self.grouped_parameters(module),
            lr=self.lr,
            weight_decay=self.weight_decay,
        )


class ModuleOptimizer(OwnClass, Optimizer, kind="module"):
    """An optimiser class of a user or of another package.

    It is called with the trainable parameters, `lr`, the `arguments`, and `weight_decay` if it is
    not 0. The schedule sets `lr` in every group of parameters. The class derives from
    torch.optim.Optimizer, and its `step` calls the closure that it gets.
    """

    base_class: ClassVar[str] = "torch.optim:Optimizer"
    runs_foreign_code: ClassVar[bool] = True

    def build(self, module: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
        """Raise ConfigError if the class does not accept its arguments, or needs a closure."""
        optimizer_class = self.load()
        closure = inspect.signature(optimizer_class.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"optimizer: {self.target} needs a closure, with which it computes the loss several"
                " times in a step, and a step of this training computes the loss once; choose an"
                " optimiser whose `step` needs no closure, such as adamw"
            )
        arguments = {"lr": self.lr, **self.arguments}
        if self.weight_decay:
            arguments["weight_decay"] = self.weight_decay
        parameters = self.grouped_parameters(module)
        try:
            built: torch.optim.Optimizer = optimizer_class(parameters, **arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"optimizer: {self.target} does not accept {', '.join(arguments)}: {error}"
            ) from error
        return built
