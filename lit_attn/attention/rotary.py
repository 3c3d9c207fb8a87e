"""Rotary position embedding (Su et al. 2021, section 3.2.2), half-split convention.

Shapes: B batch, H heads, n tokens, D head width.

Coordinates j and j + D/2 of a query or key at position t are turned by the angle t base^(-2j / D),
so that q_i.k_j depends on positions through i - j alone. The layer turns q and k (every key of a
mixture too) after their norms; v and the z of `zz` stay as they are (docs/setups.md).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """cos and sin of every angle: (n, D / 2) each, float32."""

    cos: Tensor
    sin: Tensor


def rotary(positions: Tensor, head_dim: int, base: float = 10_000.0) -> Rotary:
    """The angles of `positions` (n,) for heads of `head_dim`; ValueError where that is odd."""
    if head_dim % 2:
        raise ValueError(f"rotary positions turn pairs: a head width of {head_dim} is odd")
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = torch.outer(positions.to(torch.float32), base ** (-exponents / head_dim))
    return Rotary(angles.cos(), angles.sin())


def rotate(x: Tensor, by: Rotary) -> Tensor:
    """Turn x, (B, H, n, D), and return it in its own precision; the products are in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(wide).chunk(2, dim=-1)
    cos, sin = by.cos.to(wide), by.sin.to(wide)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.to(x.dtype)
