"""GPT whose positions are distances to the last token, as in Transformer-XL's code.

Source: github.com/minhtannguyen/transformer-mgk (docs/setups.md, section 8).
"""

from torch import Tensor

from lit_attn.attention.cache import Cache
from lit_attn.models.language import GPT
from lit_attn.models.trunk import Trunk


class ReversedTrunk(Trunk):
    """Trunk in which the position of token i of n is n - 1 - i."""

    @property
    def can_be_cached(self) -> bool:
        """False: a new token changes the positions of all earlier ones."""
        return False

    def new_caches(self) -> list[Cache]:
        """Raise ValueError, because there is nothing that could be cached."""
        raise ValueError("a model with reversed positions cannot be decoded token by token")

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return embeddings x (B, n, d) plus those of `positions` (n,) in reversed order."""
        return super().add_positions(x, positions.flip(0))


class ReversedGPT(GPT):
    """GPT with a `ReversedTrunk`."""

    trunk_class = ReversedTrunk
