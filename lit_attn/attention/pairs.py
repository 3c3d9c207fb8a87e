"""Combinations of two queries of each head.

Differential attention, version 2: released code of microsoft/unilm, Diff-Transformer-V2, January
2026.

Shapes: B batch, n tokens, d width, H heads, D head width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lit_attn.attention.masks import differs_between_heads
from lit_attn.attention.parts import LayerShape
from lit_attn.attention.precision import wide


class Pair(nn.Module):
    """Base of the combinations: `forward(x, a)` returns the heads of what the queries computed.

    x (B, n, d) are the tokens of the queries. a (B, Q H, n, E) are weighted sums or weights of the
    Q queries of each head, which are neighbours; the result is (B, H, n, E).
    """

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part = part
        # Projection of x to the second query of each head, H D columns.
        self.projection: nn.Linear | None = None

    def add_queries(self, x: Tensor, q: Tensor) -> Tensor:
        """Return the queries (B, n, Q H, D) of x, from those of the layer, q (B, n, H, D)."""
        if self.projection is None:
            return q
        second = self.projection(x).view_as(q)
        return torch.stack([q, second], dim=-2).flatten(-3, -2)

    def repeat(self, z: Tensor) -> Tensor:
        """Return z (B, H, n, D), which all queries of a head share, for each of them."""
        return z if self.projection is None else z.repeat_interleave(2, 1)

    def repeat_mask(self, mask: Tensor | None) -> Tensor | None:
        """Return a mask, broadcastable to (B, H, n, m), as one of all queries (B, Q H, n, m)."""
        if mask is None or self.projection is None or not differs_between_heads(mask):
            return mask
        return mask.repeat_interleave(2, -3)


class OneQuery(Pair):
    """One query of each head, whose result is the head."""

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        return a


class Difference(Pair):
    """h_2m - sigmoid(x w_m) h_2m+1 for the two queries of head m."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__(part, shape)
        inner = shape.heads * shape.head_dim
        self.projection = nn.Linear(shape.dim, inner, bias=shape.qkv_bias, **shape.options)
        self.factor = nn.Linear(shape.dim, shape.heads, bias=False, **shape.options)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        factors = torch.sigmoid(wide(self.factor(x))).transpose(1, 2).unsqueeze(-1)
        # Not by `unbind`, for the reason in `Differential.forward`.
        pairs = a.unflatten(1, (-1, 2))
        first, second = pairs.select(2, 0), pairs.select(2, 1)
        return first - factors.to(a.dtype) * second
