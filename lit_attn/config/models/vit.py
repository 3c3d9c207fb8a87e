"""Vision transformers for small images."""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from lit_attn.config.models.base import (
    Model,
    require_division,
    require_heads,
    require_one_size,
    require_tiling,
)
from lit_attn.config.signatures import ImageLabels
from lit_attn.schema.base import load

if TYPE_CHECKING:
    import torch
    from torch import nn


class ViTConfig(Model):
    """Pre-norm vision transformer with a class token, for images of one size."""

    takes = (ImageLabels,)

    kind: Literal["vit"] = "vit"
    dim: PositiveInt
    depth: PositiveInt
    heads: PositiveInt
    patch: PositiveInt
    qkv_bias: bool = False
    patchify: Literal["plain", "shifted"] = Field(
        "plain", description="shifted: shifted patch tokenisation (SPT), four one-pixel shifts"
    )
    local_self_attention: bool = Field(
        False, description="LSA: learned temperature per layer, no token attends to itself"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="after W and inside the FFN")
    embed_dropout: float = Field(0.0, ge=0, lt=1)
    drop_path: float = Field(0.0, ge=0, lt=1)
    drop_path_schedule: Literal["linear", "constant"] = "linear"
    init: Literal["xavier", "torch", "timm"] = "timm"

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        require_division("heads", "heads", self.heads, self.dim, f"dim {self.dim}")
        require_heads(self.attention, self.heads)
        if self.local_self_attention:
            try:
                self.attention.similarity.check_local_self_attention()
            except ValueError as error:
                raise ValueError(f"local_self_attention: {error}") from error
        return self

    def check(self, signature: ImageLabels) -> None:
        require_one_size(self.kind, signature)
        require_tiling(self.patch, [signature.shape[1:]])

    def build(
        self, signature: ImageLabels, device: "torch.device | str | None" = None
    ) -> "nn.Module":
        network: nn.Module = load("lit_attn.models.vit:build")(
            self, signature.shape, signature.classes, device
        )
        return network
