"""Networks for images of ImageNet's size, as the published set-ups have them (docs/setups.md)."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from lit_attn.config.models.base import FFN, Model, require_division, require_parts_for


class Transformer(Model):
    """What the networks of this file share; the defaults are ViT-S/16's."""

    dim: PositiveInt = 384
    depth: PositiveInt = 12
    heads: PositiveInt = 6
    patch: PositiveInt = 16
    ffn: FFN | None = FFN(width=1536)
    drop_path: float = Field(0.0, ge=0, lt=1, description="of the last layer; linear from 0")

    @model_validator(mode="after")
    def _heads_fit(self) -> "Transformer":
        require_division("heads", "heads", self.heads, self.dim, f"dim {self.dim}")
        require_parts_for(self.attention, self.heads)
        return self


class ImageViTConfig(Transformer):
    """timm's VisionTransformer for images of any size: the positions are resampled to each.

    As it stands, DeiT-S/16 (Touvron et al. 2021). With `pool: average` (which leaves the class
    token out) and `positions: sincos` (fixed) it is the ViT-S/16 of Beyer et al. 2022.
    """

    kind: Literal["image-vit"] = "image-vit"
    pool: Literal["token", "average"] = "token"
    positions: Literal["learned", "sincos"] = "learned"
    norm_eps: PositiveFloat = 1e-6


class LocalViTConfig(Transformer):
    """ViT-S/16 with a depth-wise convolution inside the FFN, which the class token goes around.

    The model of BeliefFormer's ImageNet experiment (LocalViT "hs", Li et al. 2021). The released
    code also builds, and counts, 3,924 parameters a layer that nothing uses; they are left out.
    `positions: fixed` is what it does where images grow: every change of size makes new positions
    that its optimiser, built before, never sees.
    """

    activations = ("hard-swish",)

    kind: Literal["local-vit"] = "local-vit"
    positions: Literal["learned", "fixed"] = "learned"
    ffn: FFN | None = FFN(width=1536, activation="hard-swish")
    drop_path: float = Field(0.1, ge=0, lt=1)


class JiTConfig(Transformer):
    """JiT-B/16 (Li & He 2025) as a classifier: SwiGLU, RMSNorm, QK-norm, 2-D RoPE, adaLN-zero.

    Belief2 (section 4.2) says neither what conditions the adaLN nor how it pools; here both are the
    mean over patches, of the embedded image and of the last layer. `ffn.width` is SwiGLU's.
    """

    activations = ("swiglu",)

    kind: Literal["jit"] = "jit"
    dim: PositiveInt = 768
    heads: PositiveInt = 12
    ffn: FFN | None = FFN(width=2048, activation="swiglu")
    bottleneck: PositiveInt = Field(128, description="width between the patch embedding's maps")

    @model_validator(mode="after")
    def _heads_turn_by_row_and_column(self) -> "JiTConfig":
        if self.dim % 4:
            raise ValueError(f"dim: heads have to be a multiple of 4 wide, and {self.dim} is none")
        whole = self.dim // 4
        require_division(
            "heads",
            "heads of a width that is a multiple of 4",
            self.heads,
            whole,
            f"dim {self.dim}",
        )
        return self
