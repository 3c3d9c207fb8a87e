"""Plug-in for a GPT whose positions are distances to the last token, as in Transformer-XL's code.

MGK's language models have such positions. Their study names this file under `parts`.

Source: github.com/minhtannguyen/transformer-mgk (docs/setups.md, section 8).
"""

from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from lit_attn.attention.cache import Cache
from lit_attn.models.language import GPT, GPTConfig
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


class ReversedGPTConfig(GPTConfig, kind="reversed-gpt"):
    """Causal language model whose positions count backwards, as in Transformer-XL's code.

    The sinusoidal position of a token is its distance to the last token.
    """

    runs_foreign_code = False  # Tests try it out, so a dry run need not.
    builder = (ReversedGPT, "vocabulary", "context")
    positions: Literal["sinusoidal"] = Field("sinusoidal", description="positions, from the end on")
    documents: Literal["joined"] = Field("joined", description="documents of packed text")

    def identity(self) -> dict[str, Any]:
        """Return the identity from the time when `gpt` of the package had these positions."""
        return {**super().identity(), "kind": "gpt", "positions": "sinusoidal-reversed"}
