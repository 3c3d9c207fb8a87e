"""Fake quantisation of weights to e5m2: two mantissa bits, five exponent bits.

modded-nanogpt's branch `casted`, which BeliefFormer's GPT-2 cites, trains its blocks this way: the
weight divided by its mean magnitude is rounded to e5m2 in the forward pass, and the gradient passes
to the exact weight as if nothing had been rounded (straight-through).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class E5M2Linear(nn.Linear):
    """A Linear that computes with the e5m2 rounding of its weight; its parameters are exact."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, e5m2(self.weight), self.bias)


def e5m2(weight: Tensor) -> Tensor:
    """`weight` rounded to e5m2 at the scale of its mean magnitude; the identity to the gradient."""
    scale = weight.detach().abs().mean().clamp_min(torch.finfo(weight.dtype).tiny)
    rounded = (weight.detach() / scale).to(torch.float8_e5m2).to(weight.dtype) * scale
    return weight + (rounded - weight.detach())


def quantise(block: nn.Module) -> None:
    """Let every Linear of `block` compute with rounded weights, in place; no name changes."""
    for child in block.modules():
        for name, linear in child.named_children():
            if type(linear) is nn.Linear:
                setattr(child, name, _rounding(linear))


def _rounding(linear: nn.Linear) -> E5M2Linear:
    shape = (linear.in_features, linear.out_features)
    rounding = E5M2Linear(*shape, bias=linear.bias is not None, device="meta")
    rounding.weight, rounding.bias = linear.weight, linear.bias
    return rounding
