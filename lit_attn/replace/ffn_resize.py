"""Width of the FFNs of a timm model whose constructor has no argument for it.

Such models choose a ratio for each stage or branch, or fix it in their code. Their FFNs are two
linear layers, or convolutions of 1 x 1 pixels, with the names `fc1` and `fc2`, and in PVT v2 a
depthwise convolution between them.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

INPUTS = ("in_features", "in_channels")
"""Attributes of linear layers and convolutions with the number of their inputs."""

OUTPUTS = ("out_features", "out_channels")
"""Attributes of linear layers and convolutions with the number of their outputs."""

CHANNELS = ("in_channels", "out_channels", "groups")
"""Attributes of a depthwise convolution with the number of its channels."""


def resize_ffns(model: nn.Module, width: int) -> nn.Module:
    """Resize the FFNs of `model` by one factor, so that the first has `width` hidden units.

    New parameters are drawn, with replacement, from the initial values of the old ones, which
    keeps their distribution. Returns the model. Raises ValueError if it has no such FFN.
    """
    ffns: list[Any] = [module for module in model.modules() if _is_ffn(module)]
    if not ffns:
        raise ValueError("ffn.width: it has no FFN whose width can be changed; set `match: none`")
    factor = width / len(ffns[0].fc1.weight)
    for ffn in ffns:
        hidden = max(1, round(factor * len(ffn.fc1.weight)))
        between = _depthwise(ffn)
        resize_layer(ffn.fc1, 0, hidden, OUTPUTS)
        for convolution in between:
            resize_layer(convolution, 0, hidden, CHANNELS)
        resize_layer(ffn.fc2, 1, hidden, INPUTS)
    return model


def resize_layer(layer: nn.Module, axis: int, size: int, attributes: Iterable[str]) -> None:
    """Give the parameters of `layer` the `size` along `axis`, and set its `attributes` to it."""
    for name, parameter in list(layer.named_parameters()):
        if parameter.ndim > axis and parameter.shape[axis] != size:
            setattr(layer, name, _redraw(parameter, axis, size))
    for attribute in attributes:
        if hasattr(layer, attribute):
            setattr(layer, attribute, size)


def _is_ffn(module: Any) -> bool:
    """Return True if the width is that of `fc1`, `fc2` and depthwise convolutions alone.

    It is not in the MLP of a classifier, which has other outputs than inputs, or a norm.
    """
    if "mlp" not in type(module).__name__.lower() or not hasattr(module, "fc2"):
        return False
    hidden, inputs = module.fc1.weight.shape[:2]
    resized: set[nn.Parameter] = set()
    for layer in (module.fc1, module.fc2, *_depthwise(module)):
        resized.update(layer.parameters())
    for parameter in module.parameters():
        if parameter not in resized and hidden in parameter.shape:
            return False
    return tuple(module.fc2.weight.shape[:2]) == (inputs, hidden)


def _depthwise(ffn: Any) -> list[nn.Conv2d]:
    """Return the convolutions that act on each hidden unit alone (PVT v2)."""
    hidden = len(ffn.fc1.weight)
    return [
        module
        for module in ffn.modules()
        if isinstance(module, nn.Conv2d) and module.groups == hidden
    ]


def _redraw(parameter: nn.Parameter, axis: int, size: int) -> nn.Parameter:
    """Return a parameter with `size` entries along `axis`, drawn from the values of `parameter`."""
    shape = list(parameter.shape)
    shape[axis] = size
    indices = torch.empty(shape, dtype=torch.long, device=parameter.device)
    # Filled in place, so that the draws of one shape are those of seeded_draws.by_shape.
    indices.random_(parameter.numel())
    return nn.Parameter(parameter.detach().flatten()[indices])
