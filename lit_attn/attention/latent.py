"""Keys and values of all heads from one narrow latent of each token (MLA).

DeepSeek-AI 2024, "DeepSeek-V2", https://arxiv.org/abs/2405.04434, section 2.1, eq. 9-19.

A token's latent c has a width R. Each head's key is [k_rotary, W_UK c]: the part k_rotary, which
positions rotate, comes from the token itself and is the same in all heads. Values are W_UV c. A
cache stores k_rotary and c alone. In the absorbed form, W_UK is part of the query and W_UV follows
the weighted sum, so no key or value of a cached token is computed:

    q . W_UK c = (W_UK^T q) . c        sum_j a_j W_UV c_j = W_UV (sum_j a_j c_j)

Shapes: B batch, n tokens, m tokens with the cached ones, d width, H heads, H' key heads, D head
width, T width of the rotated part, R width of the latent.
"""

import math

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from lit_attn.attention.parts import LayerShape
from lit_attn.attention.projections import is_plain
from lit_attn.attention.rotary import Rotary, rotate
from lit_attn.attention.shared_keys import KeysValues
from lit_attn.schema.base import Config

# Added to the mean square in the RMSNorm of a latent (DeepSeek's value).
LATENT_NORM_EPS = 1e-6


class LatentConfig(Config):
    """Widths of the latents of keys and values, and of queries (MLA)."""

    rank: PositiveInt | None = Field(
        None, description="width of the latent of keys and values; null: four times a head's width"
    )
    query_rank: PositiveInt | None = Field(
        None, description="width of the latent of queries; null: queries have no latent"
    )
    rotary: PositiveInt | None = Field(
        None,
        description="width of the further part of queries and keys that positions rotate, one key "
        "part for all heads; null: a head's width",
    )

    def rotary_width(self, width_of_heads: int) -> int:
        """Return the width of the rotated part in a layer of heads of this width."""
        return self.rotary or width_of_heads


class Latent(nn.Module):
    """Latents of tokens, and the keys and values of heads that follow from them."""

    def __init__(self, part: LatentConfig, shape: LayerShape) -> None:
        super().__init__()
        width = shape.head_dim
        self.head_dim = width
        self.key_heads = shape.key_heads
        self.rank = part.rank or 4 * width
        self.rotary_width = part.rotary_width(width)
        self.query_width = self.rotary_width + width
        rows = self.rotary_width + self.rank
        self.down = nn.Linear(shape.dim, rows, bias=shape.qkv_bias, **shape.options)
        self.norm = nn.RMSNorm(self.rank, eps=LATENT_NORM_EPS, **shape.options)
        # Rows of the keys of all heads, then of their values.
        rows = 2 * shape.key_heads * width
        self.up = nn.Linear(self.rank, rows, bias=False, **shape.options)
        self.query_inputs = shape.dim
        self.query_down: nn.Linear | None = None
        self.query_norm: nn.RMSNorm | None = None
        if part.query_rank is not None:
            self.query_inputs = part.query_rank
            self.query_down = nn.Linear(
                shape.dim, part.query_rank, bias=shape.qkv_bias, **shape.options
            )
            self.query_norm = nn.RMSNorm(part.query_rank, eps=LATENT_NORM_EPS, **shape.options)

    def compress_queries(self, x: Tensor) -> Tensor:
        """Return the inputs of the projection of queries: x, or its latent (B, n, query_rank)."""
        if self.query_down is None or self.query_norm is None:
            return x
        return normalise(self.query_norm, self.query_down(x))

    def compress(self, x: Tensor, by: Rotary | None) -> Tensor:
        """Return the rotated part of the keys and the latent of x, (B, 1, 1, n, T + R)."""
        turned, latent = self.down(x).split([self.rotary_width, self.rank], dim=-1)
        turned = turned[:, None, None]
        if by is not None:
            turned = rotate(turned, by)
        return torch.cat([turned, normalise(self.norm, latent)[:, None, None]], dim=-1)

    def expand(self, tokens: Tensor) -> KeysValues:
        """Return keys (B, H', 1, m, T + D) and values (B, H', m, D) of compressed tokens."""
        turned, latent = self._split(tokens)
        vectors = self.up(latent[:, 0, 0]).unflatten(-1, (2, self.key_heads, self.head_dim))
        keys, values = vectors.movedim(1, -2).unbind(1)
        turned = turned.expand(-1, self.key_heads, -1, -1, -1)
        return KeysValues(torch.cat([turned, keys.unsqueeze(2)], dim=-1), values)

    @property
    def can_absorb(self) -> bool:
        """True if calling the projection of keys and values only multiplies by its weight."""
        return is_plain(self.up)

    def absorb_queries(self, q: Tensor) -> Tensor:
        """Return queries (B, H, n, T + R) of compressed tokens from q (B, H, n, T + D).

        The layer divides products by the root of the width of q, so the factor restores that of the
        queries of the heads.
        """
        turned, of_heads = q.split([self.rotary_width, self.head_dim], dim=-1)
        weight = self._weight_of_heads(0, q.shape[1])
        absorbed = torch.cat([turned, torch.einsum("bhnd,hdr->bhnr", of_heads, weight)], dim=-1)
        return absorbed * math.sqrt(absorbed.shape[-1] / q.shape[-1])

    def read_latents(self, tokens: Tensor) -> KeysValues:
        """Return compressed tokens as keys of all heads, and their latents as values."""
        return KeysValues(tokens, self._split(tokens)[1].squeeze(2))

    def expand_sums(self, sums: Tensor) -> Tensor:
        """Return the weighted sums of values (B, H, n, D) from those of latents (B, H, n, R)."""
        weight = self._weight_of_heads(1, sums.shape[1])
        return torch.einsum("bhnr,hdr->bhnd", sums, weight.to(sums.dtype))

    def _split(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotated part of the keys and the latent of compressed tokens."""
        turned, latent = tokens.split([self.rotary_width, self.rank], dim=-1)
        return turned, latent

    def _weight_of_heads(self, number: int, heads: int) -> Tensor:
        """Return W_UK (`number` 0) or W_UV (1) of each of the `heads` heads, (H, D, R)."""
        weight = self.up.weight.unflatten(0, (2, self.key_heads, self.head_dim))[number]
        return weight.repeat_interleave(heads // self.key_heads, 0)


def normalise(norm: nn.RMSNorm, latent: Tensor) -> Tensor:
    """Return a latent after its norm, which autocast computes in the type of its weight."""
    normed: Tensor = norm(latent.to(norm.weight.dtype))
    return normed.to(latent.dtype)
