"""Combinations of two queries of each head.

Differential attention, version 2: released code of microsoft/unilm, Diff-Transformer-V2, January
2026.

Shapes: B batch, n tokens, d width, H heads, D head width.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_attn.attention.masks import differs_between_heads
from lit_attn.attention.parts import LayerChoices, LayerShape, Part
from lit_attn.attention.precision import wide
from lit_attn.schema.base import Kind


class PairConfig(Part, Kind):
    """Family of the combinations of two queries of each head.

    `build` returns a lit_attn.attention.pairs.Pair. The inputs of `reference` are x (B, n, d) and
    the sums or weights of all queries, (B, Q H, n, E); it returns those of the heads, (B, H, n, E).
    """

    queries: ClassVar[int] = 1
    """Number of queries of each head, Q."""

    def reference_queries(self, module: Any, x: Any, q: Any) -> Any:
        """Return the queries (B, n, Q H, D) of x, from those of the layer, q (B, n, H, D)."""
        return q


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


class OneQueryConfig(PairConfig, kind="none"):
    """One query of each head."""

    def build(self, shape: LayerShape) -> Any:
        return OneQuery(self, shape)

    def reference(self, module: Any, x: Tensor, a: Tensor) -> Tensor:
        return a


class OneQuery(Pair):
    """One query of each head, whose result is the head."""

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        return a


class DifferenceConfig(PairConfig, kind="difference"):
    """h_2m - sigmoid(x w_m) h_2m+1 for two queries of head m (differential attention, version 2).

    Microsoft 2026, "Differential Transformer V2", released code in microsoft/unilm,
    Diff-Transformer-V2. Both queries use the key and the value of the head. Nothing follows the
    difference: no norm, and no lambda_init. The second queries have a projection of their own here,
    so that the weights of a standard layer fit; in the released code they are rows of W_Q.
    """

    queries = 2

    def check(self, layer: LayerChoices) -> None:
        if layer.normaliser.kind == "differential":
            raise ValueError(
                "pair: 'difference' and `normaliser: differential` both subtract heads; remove one"
            )

    def build(self, shape: LayerShape) -> Any:
        return Difference(self, shape)

    def reference(self, module: Any, x: Tensor, a: Tensor) -> Tensor:
        """Differential attention, version 2: h_2m - sigmoid(x w_m) h_2m+1."""
        factors = 1 / (1 + torch.exp(-module.factor(x)))
        heads = []
        for m in range(factors.shape[-1]):
            subtracted = factors[..., m].unsqueeze(-1) * a[:, 2 * m + 1]
            heads.append(a[:, 2 * m] - subtracted)
        return torch.stack(heads, dim=1)

    def reference_queries(self, module: Any, x: Tensor, q: Tensor) -> Tensor:
        """Differential attention, version 2: the queries 2m and 2m + 1 of head m."""
        second = module.projection(x).unflatten(-1, q.shape[-2:])
        queries = []
        for m in range(q.shape[-2]):
            queries += [q[..., m, :], second[..., m, :]]
        return torch.stack(queries, dim=-2)


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
