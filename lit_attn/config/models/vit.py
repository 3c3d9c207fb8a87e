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
    dim: PositiveInt = Field(description="width of the residual stream")
    depth: PositiveInt = Field(description="number of blocks")
    heads: PositiveInt = Field(description="attention heads of a block")
    patch: PositiveInt = Field(description="side of a patch in pixels")
    qkv_bias: bool = Field(False, description="biases of the projections to q, k and v")
    patchify: Literal["plain", "shifted"] = Field(
        "plain", description="shifted: shifted patch tokenisation (SPT), four one-pixel shifts"
    )
    local_self_attention: bool = Field(
        False, description="LSA: learned temperature per layer, no token attends to itself"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate after W and inside the FFN")
    embed_dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate of the embeddings")
    drop_path: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="drop-path rate of the last layer (linear) or of all layers (constant)",
    )
    drop_path_schedule: Literal["linear", "constant"] = Field(
        "linear", description="drop-path rate over the layers: linear from 0, or constant"
    )
    init: Literal["xavier", "torch", "timm"] = Field(
        "timm", description="initial values of the Linears; timm: normal, deviation 0.02"
    )

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
