"""Width of the FFNs of a timm model whose constructor has no argument for it.

Such models choose a ratio for each stage or branch, or fix it in their code. Their FFNs are two
linear layers, or convolutions of 1 x 1 pixels, with the names `fc1` and `fc2`, and in PVT v2 a
depthwise convolution between them.
"""

from typing import Any

import torch
from torch import nn

INPUTS, OUTPUTS = ("in_features", "in_channels"), ("out_features", "out_channels")
"""Attributes of linear layers and convolutions with the numbers of their inputs and outputs."""


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
        between = [(layer, 0, ("in_channels", *OUTPUTS, "groups")) for layer in _depthwise(ffn)]
        for layer, axis, sizes in [(ffn.fc1, 0, OUTPUTS), *between, (ffn.fc2, 1, INPUTS)]:
            for name, parameter in layer.named_parameters():
                if parameter.ndim > axis and parameter.shape[axis] != hidden:
                    setattr(layer, name, _redraw(parameter, axis, hidden))
            vars(layer).update(dict.fromkeys(vars(layer).keys() & sizes, hidden))
    return model


def _is_ffn(module: Any) -> bool:
    """Return True if the width is that of `fc1`, `fc2` and depthwise convolutions alone.

    It is not in the MLP of a classifier, which has other outputs than inputs, or a norm.
    """
    if "mlp" not in type(module).__name__.lower() or not hasattr(module, "fc2"):
        return False
    hidden, inputs = module.fc1.weight.shape[:2]
    layers = (module.fc1, module.fc2, *_depthwise(module))
    resized = {parameter for layer in layers for parameter in layer.parameters()}
    others = (parameter for parameter in module.parameters() if parameter not in resized)
    is_free = all(hidden not in parameter.shape for parameter in others)
    return is_free and tuple(module.fc2.weight.shape[:2]) == (inputs, hidden)


def _depthwise(ffn: Any) -> list[nn.Conv2d]:
    """Return the convolutions that act on each hidden unit alone (PVT v2)."""
    hidden = len(ffn.fc1.weight)
    return [m for m in ffn.modules() if isinstance(m, nn.Conv2d) and m.groups == hidden]


def _redraw(parameter: nn.Parameter, axis: int, size: int) -> nn.Parameter:
    shape = [*parameter.shape]
    shape[axis] = size
    # Filled in place, so that the draws of one shape are those of seeded_draws.by_shape.
    chosen = torch.empty(shape, dtype=torch.long, device=parameter.device)
    return nn.Parameter(parameter.detach().flatten()[chosen.random_(parameter.numel())])
