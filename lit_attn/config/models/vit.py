"""Where the attention layer stands."""

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from lit_attn.config.models.base import Model, require_division, require_parts_for


class ViTConfig(Model):
    """Pre-norm vision transformer with a class token, on images of the data set's size."""

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
    def _heads_fit(self) -> "ViTConfig":
        require_division("heads", "heads", self.heads, self.dim, f"dim {self.dim}")
        require_parts_for(self.attention, self.heads)
        if self.local_self_attention:
            try:
                self.attention.similarity.check_local_self_attention()
            except ValueError as error:
                raise ValueError(f"local_self_attention: {error}") from error
        return self
