"""Base of the optimisers: their common keys, and the parameters that they train, in groups."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field, PositiveFloat
from torch import nn

from lit_attn.optim.layer_groups import find_width_rates, scale_by_layer, scale_by_width
from lit_attn.schema.base import Kind
from lit_attn.schema.errors import ConfigError


class Optimizer(Kind):
    """Base of the optimisers."""

    fuses_shards: ClassVar[bool] = False
    """True if one kernel for all parameters accepts sharded parameters (FSDP)."""
    takes_shards: ClassVar[bool] = True
    """True if the optimiser accepts sharded parameters."""
    has_width_rates: ClassVar[bool] = False
    """True if muP's rates by width (`mup` of a model) are rates of this optimiser."""

    is_recordable: ClassVar[bool] = False
    """True if a CUDA graph can repeat a step: what differs between steps are tensors, and the rate
    can be one (`capturable`), or the change of the weights is proportional to it."""

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
    def build(self, module: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
        """Return the optimiser over the trainable parameters of `module`.

        `fused` asks for one kernel for all parameters, if the optimiser has such a kernel.
        """

    def clip(self, parameters: Sequence[nn.Parameter], norm: float) -> None:
        """Scale the gradients of `parameters` to a joint norm of at most `norm`."""
        nn.utils.clip_grad_norm_(parameters, norm)

    def try_out(self, signature: Any) -> None:
        module = torch.nn.Linear(2, 2)
        module(torch.ones(1, 2)).sum().backward()
        # A layer alone has no blocks with different rates.
        equal_rates = self.model_copy(update={"layer_decay": None})
        equal_rates.build(module, fused=True).step()

    def grouped_parameters(self, module: nn.Module) -> list[Any]:
        """Return the trainable parameters of `module`, in groups by layer if the rate differs."""
        return self.group_by_layer(module, self.parameters(module))

    def group_by_layer(self, module: nn.Module, parameters: list[Any]) -> list[Any]:
        """Return the parameters, or groups of them if rates differ by layer or by width (muP)."""
        if self.layer_decay is not None:
            parameters = scale_by_layer(module, parameters, self.layer_decay)
        rates = find_width_rates(module)
        if not rates:
            return parameters
        if not self.has_width_rates:
            raise ConfigError(
                f"optimizer: '{self.kind}' has no learning rates by width, which `model.mup` "
                "needs; choose adamw"
            )
        return scale_by_width(parameters, rates, self.weight_decay)

    def parameters(self, module: nn.Module) -> list[Any]:
        """Return the trainable parameters of `module`, or groups of them."""
        return [parameter for parameter in module.parameters() if parameter.requires_grad]


def find_declared(module: nn.Module, method: str) -> set[str]:
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
