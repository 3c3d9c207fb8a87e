"""Maps of each head's q, k and v, before their norms and the cache.

Knocking heads: Zhou et al. 2025, https://arxiv.org/abs/2510.23052.

Shapes: B batch, n tokens, H heads, H' key heads, D head width.
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from lit_attn.attention.parts import LayerShape, Part
from lit_attn.schema.base import Kind


class TransformConfig(Part, Kind):
    """Family of the maps of each head's q, k and v.

    `build` returns a lit_attn.attention.transform.Transform. The inputs of `reference` are q, k and
    v, (B, n, heads, D) each; it returns the three after their maps.
    """

    def find_own_keys_use(self) -> str:
        return "maps k and v"


class Transform(nn.Module):
    """Base of the maps: `forward(q, k, v)` returns the three after their maps.

    q is (B, n, H, D); k and v are (B, m, H', D).
    """

    is_identity = False
    """True if the three are unchanged."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part = part

    def parameters_of_weights(self) -> list[Tensor]:
        """Return the parameters that change only the attention weights, not the values."""
        return []


class NoTransformConfig(TransformConfig, kind="none"):
    """Unchanged q, k and v."""

    def find_own_keys_use(self) -> str:
        return ""

    def build(self, shape: LayerShape) -> Any:
        return NoTransform(self, shape)

    def reference(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v


class NoTransform(Transform):
    """Unchanged q, k and v."""

    is_identity = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v


class LinearTransformConfig(TransformConfig, kind="linear"):
    """q T_Q, k T_K and v T_V with D x D matrices that all heads share (knocking heads).

    Zhou et al. 2025, "Knocking-Heads Attention", https://arxiv.org/abs/2510.23052. The matrices
    start as the identity. The paper was read; no official code was available to compare with.
    """

    maps: Literal["qkv", "v"] = Field("qkv", description="vectors that have a map")

    def exempt_parameters(self) -> tuple[str, ...]:
        return tuple(f"matrices.{name}" for name in self.maps)

    def build(self, shape: LayerShape) -> Any:
        return LinearTransform(self, shape)

    def reference(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Knocking heads, linear: one D x D matrix for all heads of q, k and v."""
        mapped = []
        for name, vectors in (("q", q), ("k", k), ("v", v)):
            if name in module.part.maps:
                vectors = torch.einsum("bnhd,de->bnhe", vectors, module.matrices[name])
            mapped.append(vectors)
        return mapped[0], mapped[1], mapped[2]


class LinearTransform(Transform):
    """q T_Q, k T_K and v T_V, or v T_V alone."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__(part, shape)
        width = shape.head_dim
        self.matrices = nn.ParameterDict()
        for name in part.maps:
            self.matrices[name] = nn.Parameter(torch.empty(width, width, **shape.options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every matrix to the identity."""
        for matrix in self.matrices.values():
            nn.init.eye_(matrix)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.part.maps == "qkv":
            q = q @ self.matrices["q"]
            k = k @ self.matrices["k"]
        return q, k, v @ self.matrices["v"]

    def parameters_of_weights(self) -> list[Tensor]:
        return [matrix for name, matrix in self.matrices.items() if name != "v"]


class MlpTransformConfig(TransformConfig, kind="mlp"):
    """v becomes 2 (v W_up * sigmoid(v W_gate)) W_down, with matrices that all heads share.

    Zhou et al. 2025, https://arxiv.org/abs/2510.23052. W_up and W_down start as the identity and
    W_gate at 0, so v starts unchanged.
    """

    def exempt_parameters(self) -> tuple[str, ...]:
        return ("up", "gate", "down")

    def build(self, shape: LayerShape) -> Any:
        return MlpTransform(self, shape)

    def reference(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Knocking heads, MLP: 2 (v W_up * sigmoid(v W_gate)) W_down."""
        up = torch.einsum("bnhd,de->bnhe", v, module.up)
        gate = 1 / (1 + torch.exp(-torch.einsum("bnhd,de->bnhe", v, module.gate)))
        return q, k, 2 * torch.einsum("bnhd,de->bnhe", up * gate, module.down)


class MlpTransform(Transform):
    """2 (v W_up * sigmoid(v W_gate)) W_down."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__(part, shape)
        width = shape.head_dim
        self.up = nn.Parameter(torch.empty(width, width, **shape.options))
        self.gate = nn.Parameter(torch.empty(width, width, **shape.options))
        self.down = nn.Parameter(torch.empty(width, width, **shape.options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the matrices so that v is unchanged."""
        nn.init.eye_(self.up)
        nn.init.zeros_(self.gate)
        nn.init.eye_(self.down)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        opened = torch.sigmoid(v @ self.gate)
        return q, k, 2 * ((v @ self.up) * opened) @ self.down
