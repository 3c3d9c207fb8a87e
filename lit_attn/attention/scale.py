"""Factors of all logits of a query.

SSMax: Nakanishi 2025, https://arxiv.org/abs/2501.19399.

Shapes: B batch, H heads, n queries, m keys.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lit_attn.attention.masks import Masks
from lit_attn.attention.parts import LayerShape
from lit_attn.attention.precision import wide


class Scale(nn.Module):
    """Base of the factors: `forward(masks, n, m, device)` returns (B or 1, H, n, 1), or None.

    It is the factor of the logits of every query, in float32 or wider; None changes no logit.
    """

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part = part


class NoScale(Scale):
    """Unchanged logits."""

    def forward(self, masks: Masks, n: int, m: int, device: torch.device) -> None:
        return None


class Ssmax(Scale):
    """c_m log(n_i), where n_i is the number of keys that query i sees."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__(part, shape)
        self.strength = nn.Parameter(torch.empty(shape.heads, **shape.options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.strength, self.part.start)

    def forward(self, masks: Masks, n: int, m: int, device: torch.device) -> Tensor:
        strength = wide(self.strength)
        visible_keys = masks.count_visible(n, m, device).to(strength.dtype)
        return strength.view(-1, 1, 1) * visible_keys.log()
