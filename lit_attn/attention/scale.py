"""Factors of all logits of a query.

SSMax: Nakanishi 2025, https://arxiv.org/abs/2501.19399.

Shapes: B batch, H heads, n queries, m keys.
"""

from typing import Any

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn

from lit_attn.attention.masks import Masks
from lit_attn.attention.parts import LayerShape, Part
from lit_attn.attention.precision import wide
from lit_attn.schema.base import Kind


class ScaleConfig(Part, Kind):
    """Family of the factors of all logits of a query.

    If a token has several keys, the logit of each of them has the factor. `build` returns a
    lit_attn.attention.scale.Scale. The inputs of `reference` are `visible`, broadcastable to
    (B, H, n, n), True where a query attends to a key, and the number of keys n. It returns a
    number, or factors broadcastable to (B, H, n, n).
    """


class Scale(nn.Module):
    """Base of the factors: `forward(masks, n, m, device)` returns (B or 1, H, n, 1), or None.

    It is the factor of the logits of every query, in float32 or wider; None changes no logit.
    """

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part = part


class NoScaleConfig(ScaleConfig, kind="none"):
    """Unchanged logits."""

    def build(self, shape: LayerShape) -> Any:
        return NoScale(self, shape)

    def reference(self, module: Any, visible: Tensor, n: int) -> float:
        return 1.0


class NoScale(Scale):
    """Unchanged logits."""

    def forward(self, masks: Masks, n: int, m: int, device: torch.device) -> None:
        return None


class FixedScaleConfig(ScaleConfig):
    """Logits multiplied by one number, beside their 1 / sqrt(D); `mup` of a model sets it."""

    factor: PositiveFloat = Field(1.0, description="factor of all logits")

    def build(self, shape: LayerShape) -> Any:
        return FixedScale(self, shape)

    def reference(self, module: Any, visible: Tensor, n: int) -> float:
        factor: float = module.part.factor
        return factor


class FixedScale(Scale):
    """One number for all logits."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__(part, shape)
        self.heads = shape.heads

    def forward(self, masks: Masks, n: int, m: int, device: torch.device) -> Tensor:
        return torch.full((1, self.heads, n, 1), self.part.factor, device=device)


class SsmaxConfig(ScaleConfig, kind="ssmax"):
    """s_ij becomes c_m log(n_i) s_ij, with a learned c_m of each head (scalable softmax, SSMax).

    Nakanishi 2025, "Scalable-Softmax Is Superior for Attention", https://arxiv.org/abs/2501.19399.
    n_i is the number of keys that token i sees, i + 1 in causal order.
    """

    start: PositiveFloat = Field(0.43, description="initial c_m")

    def build(self, shape: LayerShape) -> Any:
        return Ssmax(self, shape)

    def reference(self, module: Any, visible: Tensor, n: int) -> Tensor:
        """SSMax: c_m log(n_i)."""
        count = visible.expand(*visible.shape[:-1], n).sum(-1, keepdim=True)
        return module.strength.view(-1, 1, 1) * count.clamp_min(1).double().log()


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
