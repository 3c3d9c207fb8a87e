"""Plug-in for a GPT whose positions are distances to the last token.

MGK's language models have such positions. Their study names this file under `parts`. Its torch code
is in reversed_positions_network.py, which a cell imports when it is built.

Source: github.com/minhtannguyen/transformer-mgk (docs/setups.md, section 8).
"""

from typing import Any, Literal

from pydantic import Field

from lit_attn.config.models.language import GPTConfig


class ReversedGPTConfig(GPTConfig, kind="reversed-gpt"):
    """Causal language model whose positions count backwards, as in Transformer-XL's code.

    The sinusoidal position of a token is its distance to the last token.
    """

    runs_foreign_code = False  # Tests try it out, so a dry run need not import PyTorch.
    builder = ("reversed_positions_network:ReversedGPT", "vocabulary", "context")
    positions: Literal["sinusoidal"] = Field("sinusoidal", description="positions, from the end on")

    def identity(self) -> dict[str, Any]:
        """Return the identity from the time when `gpt` of the package had these positions."""
        return {**super().identity(), "kind": "gpt", "positions": "sinusoidal-reversed"}
