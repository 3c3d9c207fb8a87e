"""Layers and gradients with which the fast form of a preset is compared with its reference.

`lit-attn bench` compares in float64 (lit_attn.bench.formulas), and `lit-attn doctor` in every
precision of a device (lit_attn.doctor.layers). Each has its own unit of errors.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.network import number_layers

NOISE = 0.05
"""Standard deviation of the noise on all parameters, many of which start as zeros: a gate of zero
would hide a wrong term."""


def build_noisy_layer(
    chosen: str | type[Attention],
    dim: int,
    heads: int,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Attention:
    """Return the layer of a preset or class in evaluation mode, without parameters that are zero.

    Random numbers start from seed 0. `options` are further arguments of the layer.
    """
    torch.manual_seed(0)
    layer_class = attn_layer(chosen) if isinstance(chosen, str) else chosen
    layer = layer_class(dim, heads, **options).to(dtype).eval()
    number_layers(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(NOISE * torch.randn_like(parameter))
    return layer


def differentiate(output: Tensor, leaves: Sequence[Tensor], direction: Tensor) -> list[Tensor]:
    """Return `output` and the gradients of its product with `direction` for each of `leaves`.

    The gradient of a leaf that `output` does not depend on is zero.
    """
    gradients = torch.autograd.grad(
        output, leaves, direction.to(output), allow_unused=True, materialize_grads=True
    )
    return [output.detach(), *gradients]


def largest(errors: Sequence[float]) -> float:
    """Return the largest error, or NaN if one is NaN."""
    if any(math.isnan(error) for error in errors):
        return math.nan
    return max(errors)
