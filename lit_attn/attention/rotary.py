"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864, section 3.2.2).

Shapes: B batch, H heads, n tokens, D head width.

Coordinates j and j + D/2 of a query or key at position t are rotated by the angle t base^(-2j / D),
so q_i.k_j depends on positions only through i - j. The layer rotates q and all keys after their
norms; v and z are not rotated (docs/setups.md).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """Cosine and sine of every angle, (n, D / 2) each, float32.

    Axes of size B or 1 and H or 1 may come first. If there are fewer than D / 2 angles, the last
    coordinates are not rotated (partial rotary embedding).
    """

    cos: Tensor
    sin: Tensor


def rotary(positions: Tensor, head_dim: int, base: float = 10_000.0) -> Rotary:
    """Return the angles of `positions` (..., n); raise ValueError if `head_dim` is odd."""
    if head_dim % 2:
        raise ValueError(f"rotary positions need an even head width, not {head_dim}")
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    # In float32 this is the released codes' value to the last bit; base ** (-j / D) is not.
    frequencies = 1.0 / base ** (exponents / head_dim)
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return Rotary(angles.cos(), angles.sin())


def rotate(x: Tensor, by: Rotary) -> Tensor:
    """Return x, q (B, H, n, D) or keys (B, H', M, n, D), rotated; products are float32 or wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos = by.cos.to(dtype)
    sin = by.sin.to(dtype)
    if x.ndim == 5 and cos.ndim > 2:
        # All M keys of a token have its position.
        cos = cos.unsqueeze(-3)
        sin = sin.unsqueeze(-3)
    width = 2 * cos.shape[-1]
    first, second = x[..., :width].to(dtype).chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    rotated = rotated.to(x.dtype)
    if width == x.shape[-1]:
        return rotated
    return torch.cat([rotated, x[..., width:]], dim=-1)
