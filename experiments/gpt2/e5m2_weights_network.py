"""GPT that trains with the matrices of its blocks rounded to e5m2: 5 exponent, 2 mantissa bits.

Source: the branch `casted` of github.com/KellerJordan/modded-nanogpt at 632bbe4f (docs/setups.md,
section 4).
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.models.language import GPT
from lit_attn.models.layers import Device

if TYPE_CHECKING:
    from e5m2_weights import E5M2GPTConfig


class E5M2GPT(GPT):
    """GPT whose blocks have rounded matrices, unless the configuration wants exact ones."""

    def __init__(
        self, model: "E5M2GPTConfig", vocabulary: int, context: int, device: Device = None
    ) -> None:
        super().__init__(model, vocabulary, context, device)
        if model.weights == "e5m2":
            quantise(self.trunk.blocks)


class E5M2Linear(nn.Linear):
    """Linear layer that computes with its weight rounded to e5m2; the parameter stays exact."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, e5m2(self.weight), self.bias)


def e5m2(weight: Tensor) -> Tensor:
    """Return `weight` rounded to e5m2 at the scale of its mean magnitude.

    The gradient passes to the exact weight as if nothing were rounded (straight-through).
    """
    exact = weight.detach()
    scale = exact.abs().mean().clamp_min(torch.finfo(weight.dtype).tiny)
    rounded = (exact / scale).to(torch.float8_e5m2).to(weight.dtype) * scale
    return weight + (rounded - exact)


def quantise(blocks: nn.Module) -> None:
    """Turn every Linear of `blocks` into an `E5M2Linear`, in place, with the same parameters."""
    for linear in blocks.modules():
        if type(linear) is nn.Linear:
            linear.__class__ = E5M2Linear
