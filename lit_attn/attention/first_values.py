"""Values of a network's first layer, mixed into those of later layers (value residual).

Zhou et al. 2024, "Value Residual Learning", https://arxiv.org/abs/2410.17897, section 3.

Shapes: B batch, n tokens, H' key heads, D head width.
"""

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from lit_attn.attention.channel import Channel
from lit_attn.attention.parts import LayerShape, Part
from lit_attn.attention.precision import wide
from lit_attn.schema.base import Kind


class FirstValues(Channel):
    """Channel of a network that brings the values of its first layer to later layers.

    The first layer writes its values (B, n, H', D) in each forward pass, and later layers of the
    same pass read them.
    """

    key = "values"
    source = "first layer"
    content = "values"

    @property
    def values(self) -> Tensor | None:
        """Values of the running forward pass, or None before the first layer."""
        return None if self.tensors is None else self.tensors[0]

    def read(self) -> Tensor:
        """Return the values of the running forward pass."""
        return self.take()[0]


class ValuesConfig(Part, Kind):
    """Family of the mixtures of a layer's values with those of the network's first layer.

    `build` returns a lit_attn.attention.first_values.Values. The inputs of `reference` are the
    layer's v after its map, and the v of the first layer, (B, n, H', D) each; it returns the values
    that the layer uses: for the weighted sums, the residual part and the cache.
    """

    reads_first: ClassVar[bool] = True
    """False for a part that leaves v unchanged, so that a layer needs no values of the first."""

    def find_own_keys_use(self) -> str:
        return "mixes values of the layer itself" if self.reads_first else ""


class Values(nn.Module):
    """Base of the mixtures with the values of the first layer.

    `forward(v, first)` returns the values that the layer uses, from its own v and those of the
    first layer, (B, n, H', D) each. The first layer itself does not call it.
    """

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part = part

    def set_depth(self, layer: int) -> None:
        """Prepare for the number of the layer, which counts from 0; ignored here."""


class OwnValuesConfig(ValuesConfig, kind="own"):
    """The layer's own values."""

    reads_first = False

    def build(self, shape: LayerShape) -> Any:
        return OwnValues(self, shape)

    def reference(self, module: Any, v: Tensor, first: Tensor) -> Tensor:
        return v


class OwnValues(Values):
    """The layer's own values."""

    def forward(self, v: Tensor, first: Tensor) -> Tensor:
        return v


class FirstValuesConfig(ValuesConfig, kind="first"):
    """first v^(0) + layer v, where v^(0) are the values of the first layer (value residual).

    Zhou et al. 2024, "Value Residual Learning", https://arxiv.org/abs/2410.17897, section 3. The
    first layer is unchanged. The released code has fixed factors of 0.5; the paper also learns
    them, and tries larger factors of v^(0).
    """

    needs_self = "reads the values of the first layer of one sequence"
    first: float = Field(0.5, description="factor of the first layer's values, or its start")
    layer: float = Field(0.5, description="factor of the layer's own values, or its start")
    learned: bool = Field(False, description="learn both factors in each layer after the first")

    def build(self, shape: LayerShape) -> Any:
        return MixedValues(self, shape)

    def reference(self, module: Any, v: Tensor, first: Tensor) -> Tensor:
        """Value residual: lambda_1 v^(0) + lambda_2 v."""
        if module.part.learned:
            return module.factors[0] * first + module.factors[1] * v
        return module.part.first * first + module.part.layer * v


class MixedValues(Values):
    """first v^(0) + layer v, with fixed or learned factors."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__(part, shape)
        self.options = shape.options
        # The factors of v^(0) and of v, if they are learned.
        self.factors: nn.Parameter | None = None
        self.set_depth(1)

    def set_depth(self, layer: int) -> None:
        """Remove the learned factors of the first layer, which would have no gradient."""
        has_factors = self.part.learned and layer > 0
        if not has_factors:
            self.factors = None
        elif self.factors is None:
            self.factors = nn.Parameter(torch.empty(2, **self.options))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.factors is not None:
            with torch.no_grad():
                self.factors.copy_(torch.tensor([self.part.first, self.part.layer]))

    def forward(self, v: Tensor, first: Tensor) -> Tensor:
        if self.factors is None:
            return self.part.first * first + self.part.layer * v
        factors = wide(self.factors)
        return (factors[0] * first + factors[1] * v).to(v.dtype)
