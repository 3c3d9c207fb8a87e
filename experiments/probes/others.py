"""Plug-in for attention to other tokens only: a control for layers that remove a token's own value.

XSA and Belief-Attention remove from a token's output what is parallel to its own value. A layer
that does not attend to its own token is the plain way to leave the own value out.
"""

from typing import Any

import torch
from torch import Tensor

from lit_attn.attention.bias import Bias, BiasConfig
from lit_attn.attention.cache import Cache
from lit_attn.attention.masks import Masks
from lit_attn.attention.parts import LayerShape
from lit_attn.attention.precision import wide

HIDDEN = -1e4
"""Number added to the logit of a token and itself: its weight becomes 0, or stays 1 if it is the
only key, as for the first token of a causal layer."""


class OthersConfig(BiasConfig, kind="others"):
    """Attention to all visible tokens but the query's own one, where there is another one."""

    needs_self = "hides a token from itself"

    def build(self, shape: LayerShape) -> Any:
        return Others(self, shape)

    def reference(self, module: Any, x: Tensor, is_causal: bool, present: Tensor | None) -> Tensor:
        """Return the bias pair by pair."""
        n = x.shape[1]
        bias = x.new_zeros(1, 1, n, n)
        for i in range(n):
            bias[0, 0, i, i] = HIDDEN
        return bias


class Others(Bias):
    """HIDDEN on the diagonal."""

    def forward(self, x: Tensor, masks: Masks, cache: Cache | None) -> Tensor:
        queries = torch.arange(masks.offset, masks.offset + x.shape[1], device=x.device)
        keys = torch.arange(masks.offset + x.shape[1], device=x.device)
        is_own = queries.unsqueeze(1) == keys
        return is_own.to(wide(x).dtype) * HIDDEN
