"""Plug-in for a GPT whose blocks compute with weights of 8 bits.

The study of BeliefFormer's GPT-2 names this file under `parts`. Its torch code is in
e5m2_weights_network.py, which a cell imports when it is built.

Source: the branch `casted` of github.com/KellerJordan/modded-nanogpt at 632bbe4f (docs/setups.md,
section 4).
"""

from typing import Any, Literal

from pydantic import Field

from lit_attn.config.models.language import GPTConfig


class E5M2GPTConfig(GPTConfig, kind="e5m2-gpt"):
    """Causal language model that rounds the matrices of its blocks in the forward pass."""

    runs_foreign_code = False  # Tests try it out, so a dry run need not import PyTorch.
    builder = ("e5m2_weights_network:E5M2GPT", "vocabulary", "context")
    weights: Literal["e5m2", "exact"] = Field(
        "e5m2", description="e5m2: the forward pass rounds the blocks' matrices to 8 bits"
    )

    def identity(self) -> dict[str, Any]:
        """Return the identity from the time when `gpt` of the package had the key `weights`.

        The value `exact` was the default there, which an identity does not contain.
        """
        identity = {**super().identity(), "kind": "gpt"}
        identity.pop("weights", None)
        if self.weights == "e5m2":
            identity["weights"] = "e5m2"
        return identity
