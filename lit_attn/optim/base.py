"""Base of the optimisers: their common keys, and the parameters that they train, in groups."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field, PositiveFloat
from torch import nn

from lit_attn.models.blocks import find_blocks
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


def find_depths(module: nn.Module) -> tuple[dict[int, int], int]:
    """Return the depth of each parameter by its id, and the depth of the output.

    Parameters before the first block (embeddings) have depth 0, and those of block i (from 1) depth
    i. After the last block, a norm belongs to this block, and the head has the depth of the output,
    which is the number of blocks plus 1, as in timm. Other parameters belong to the block that
    follows them. The order is that of `named_parameters`. Raises ConfigError for a network without
    blocks.
    """
    blocks = list(find_blocks(module, "optimizer.layer_decay"))
    modules = dict(module.named_modules())
    output = len(blocks) + 1
    # Modules and not parameters say which blocks have passed: an optimiser may have only the
    # parameters outside of the blocks.
    passed = 0
    passed_at = {}
    for path in modules:
        if path in blocks:
            passed = blocks.index(path) + 1
        passed_at[path] = passed
    depths: dict[int, int] = {}
    for name, parameter in module.named_parameters():
        path = name.rpartition(".")[0]
        depth = 0 if passed_at[path] == 0 else passed_at[path] + 1
        is_norm = parameter.ndim < 2 and not isinstance(modules[path], nn.Linear)
        if depth == output and is_norm:
            depth = len(blocks)
        for number, block in enumerate(blocks, start=1):
            if name.startswith(f"{block}."):
                depth = number
        depths[id(parameter)] = depth
    return depths, output


def as_groups(parameters: list[Any]) -> list[dict[str, Any]]:
    """Return groups of an optimiser's parameters; parameters without groups are one."""
    has_groups = bool(parameters) and isinstance(parameters[0], dict)
    return parameters if has_groups else [{"params": parameters}]


def scale_by_layer(module: nn.Module, parameters: list[Any], decay: float) -> list[dict[str, Any]]:
    """Return groups of `parameters` with the factor `lr_scale` of the learning rate.

    The factor of a parameter is `decay` to the power of its distance from the output. `parameters`
    are parameters of `module`, or groups of them, whose other settings the new groups keep.
    """
    depths, output = find_depths(module)
    scaled: list[dict[str, Any]] = []
    for group in as_groups(parameters):
        by_depth: dict[int, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_depth.setdefault(depths[id(parameter)], []).append(parameter)
        for depth, members in sorted(by_depth.items()):
            scale = decay ** (output - depth)
            scaled.append({**group, "params": members, "lr_scale": scale})
    return scaled


def find_width_rates(module: nn.Module) -> dict[int, float]:
    """Return the factors of the learning rate that parts of `module` declare, by parameter id.

    A part declares them as the attribute `lr_scales`, by the name of a parameter in it (muP).
    """
    rates: dict[int, float] = {}
    for part in dict(module.named_modules()).values():
        declared = getattr(part, "lr_scales", {})
        for name, rate in declared.items():
            rates[id(part.get_parameter(name))] = rate
    return rates


def scale_by_width(
    parameters: list[Any], rates: dict[int, float], decay: float
) -> list[dict[str, Any]]:
    """Return groups of `parameters` with the factors `rates` of the learning rate, by their id.

    The product of rate and weight decay stays, as in the authors' optimisers: `decay` is that of
    groups without one of their own.
    """
    scaled: list[dict[str, Any]] = []
    for group in as_groups(parameters):
        by_rate: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_rate.setdefault(rates.get(id(parameter), 1.0), []).append(parameter)
        group_decay = group.get("weight_decay", decay)
        for rate, members in sorted(by_rate.items(), reverse=True):
            settings = {
                "params": members,
                "lr_scale": group.get("lr_scale", 1.0) * rate,
                "weight_decay": group_decay / rate,
            }
            scaled.append(group | settings)
    return scaled
