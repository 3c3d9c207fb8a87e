"""Maps of each head's q, k and v, before their norms and the cache.

Knocking heads: Zhou et al. 2025, https://arxiv.org/abs/2510.23052.

Shapes: B batch, n tokens, H heads, H' key heads, D head width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lit_attn.attention.parts import LayerShape


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


class NoTransform(Transform):
    """Unchanged q, k and v."""

    is_identity = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v


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
