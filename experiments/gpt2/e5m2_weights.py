"""Plug-in for a GPT that trains with the matrices of its blocks rounded to e5m2.

The format e5m2 has 5 exponent and 2 mantissa bits. The study of BeliefFormer's GPT-2 names this
file under `parts`.

Source: the branch `casted` of github.com/KellerJordan/modded-nanogpt at 632bbe4f (docs/setups.md,
section 4).
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.models.language import GPT, GPTConfig
from lit_attn.models.layers import Device


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


class E5M2GPTConfig(GPTConfig, kind="e5m2-gpt"):
    """Causal language model that rounds the matrices of its blocks in the forward pass."""

    runs_foreign_code = False  # Tests try it out, so a dry run need not.
    builder = (E5M2GPT, "vocabulary", "context")
    weights: Literal["e5m2", "exact"] = Field(
        "e5m2", description="e5m2: the forward pass rounds the blocks' matrices to 8 bits"
    )

    def identity(self) -> dict[str, Any]:
        """Return the identity from the time when `gpt` of the package had the key `weights`.

        The value `exact` was the default there, which an identity does not contain.
        """
        identity = {**super().identity(), "kind": "gpt"}
        identity.pop("weights", None)
        if self.weights == "e5m2":
            identity["weights"] = "e5m2"
        return identity
