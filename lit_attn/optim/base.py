"""Optimisers: the configuration of each, and how it is built over the parameters of a module."""

from abc import abstractmethod
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat

from lit_attn.schema.base import Kind, Share, load

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn


class Optimizer(Kind):
    """Base of the optimisers."""

    fuses_shards: ClassVar[bool] = False
    """True if one kernel for all parameters accepts sharded parameters (FSDP)."""
    takes_shards: ClassVar[bool] = True
    """True if the optimiser accepts sharded parameters."""

    lr: PositiveFloat = Field(description="peak learning rate, which the schedule scales")
    weight_decay: float = Field(0.0, ge=0, description="weight-decay coefficient")
    layer_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="factor of the learning rate from a block to the one before it, for "
        "fine-tuning; the head has the complete rate, as in timm; null: equal rates",
    )

    @abstractmethod
    def build(self, module: "nn.Module", fused: bool = True) -> "torch.optim.Optimizer":
        """Return the optimiser over the trainable parameters of `module`.

        `fused` asks for one kernel for all parameters, if the optimiser has such a kernel.
        """

    def clip(self, parameters: "Sequence[nn.Parameter]", norm: float) -> None:
        """Scale the gradients of `parameters` to a joint norm of at most `norm`."""
        clip_grad_norm = load("torch.nn.utils:clip_grad_norm_")
        clip_grad_norm(parameters, norm)

    def try_out(self, signature: Any) -> None:
        import torch

        module = torch.nn.Linear(2, 2)
        module(torch.ones(1, 2)).sum().backward()
        # A layer alone has no blocks with different rates.
        equal_rates = self.model_copy(update={"layer_decay": None})
        equal_rates.build(module, fused=True).step()

    def grouped_parameters(self, module: "nn.Module") -> list[Any]:
        """Return the trainable parameters of `module`, in groups by layer if the rate differs."""
        return self.group_by_layer(module, self.parameters(module))

    def group_by_layer(self, module: "nn.Module", parameters: list[Any]) -> list[Any]:
        """Return the parameters, or groups of them, with a rate of each layer if rates differ."""
        if self.layer_decay is None:
            return parameters
        scale_by_layer = load("lit_attn.optim.layer_groups:scale_by_layer")
        groups: list[Any] = scale_by_layer(module, parameters, self.layer_decay)
        return groups

    def parameters(self, module: "nn.Module") -> list[Any]:
        """Return the trainable parameters of `module`, or groups of them."""
        return [parameter for parameter in module.parameters() if parameter.requires_grad]


class SGD(Optimizer, kind="sgd"):
    """Gradient descent with Nesterov's momentum, as timm's "sgd"; weight decay is coupled (L2)."""

    momentum: float = Field(0.9, gt=0, lt=1, description="decay of the momentum")

    def build(self, module: "nn.Module", fused: bool = True) -> "torch.optim.Optimizer":
        import torch

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
    target: ClassVar[str]
    """Class of the optimiser as "module:name"."""

    betas: tuple[Share, Share] = Field(
        (0.9, 0.999), description="decays of the means of gradients and of their squares"
    )
    eps: PositiveFloat = Field(1e-8, description="added to the root of the mean square")

    def build(self, module: "nn.Module", fused: bool = True) -> "torch.optim.Optimizer":
        optimizer_class = load(self.target)
        return optimizer_class(
            self.grouped_parameters(module),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=fused,
        )


class Adam(Adaptive, kind="adam"):
    """Adam (Kingma & Ba 2015); weight decay is coupled (L2)."""

    target = "torch.optim:Adam"


class AdamW(Adaptive, kind="adamw"):
    """AdamW (Loshchilov & Hutter 2019): weight decay is decoupled from the gradient."""

    target = "torch.optim:AdamW"
    decay: Literal["all", "matrices", "weights"] = Field(
        "all",
        description="parameters with weight decay: all; matrices: tensors of 2 or more axes, as "
        "nanoGPT; weights: the same without positions, class tokens, scales and priors, as timm",
    )

    def parameters(self, module: "nn.Module") -> list[Any]:
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


def find_declared(module: "nn.Module", method: str) -> set[str]:
    """Return the parameters that any submodule of `module` declares with `method`, by full name.

    The method returns names or patterns relative to its submodule, as `no_weight_decay` of timm's
    models does.
    """
    names: set[str] = set()
    for path, part in module.named_modules():
        declare = getattr(type(part), method, None)
        if callable(declare):
            prefix = f"{path}." if path else ""
            names.update(f"{prefix}{name}" for name in declare(part))
    return names
