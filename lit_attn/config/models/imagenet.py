"""Models for images of ImageNet's size, after the published set-ups (docs/setups.md)."""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from lit_attn.config.models.base import (
    FFN,
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


class Transformer(Model):
    """Base of the models of images; the defaults are those of ViT-S/16."""

    dim: PositiveInt = Field(384, description="width of the residual stream")
    depth: PositiveInt = Field(12, description="number of blocks")
    heads: PositiveInt = Field(6, description="attention heads of a block")
    patch: PositiveInt = Field(16, description="side of a patch in pixels")
    ffn: FFN | None = Field(
        FFN(width=1536),
        description="feed-forward network of every block; null (or `none`): no FFN and no "
        "norm of it",
    )
    drop_path: float = Field(
        0.0, ge=0, lt=1, description="drop-path rate of the last layer; linear from 0"
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        require_division("heads", "heads", self.heads, self.dim, f"dim {self.dim}")
        require_heads(self.attention, self.heads)
        return self


class ImageViTConfig(Transformer):
    """timm's VisionTransformer for images of any size, with positions resampled to each size.

    The defaults are DeiT-S/16 (Touvron et al. 2021). With `pool: average`, which drops the class
    token, `positions: sincos` (fixed), `init: flax` and `ffn.activation: gelu-tanh` it is the
    ViT-S/16 of Beyer et al. 2022.
    """

    takes = (ImageLabels,)

    activations = ("gelu", "gelu-tanh")

    kind: Literal["image-vit"] = "image-vit"
    pool: Literal["token", "average"] = Field(
        "token",
        description="input of the classifier: the class token, or the average of the patches",
    )
    positions: Literal["learned", "sincos"] = Field(
        "learned", description="position embeddings: learned, or fixed sines and cosines"
    )
    init: Literal["timm", "flax"] = Field(
        "timm",
        description="initial values; timm: matrices N(0, 0.02), truncated; flax: as big_vision, "
        "Xavier-uniform matrices and a head of zeros",
    )
    norm_eps: PositiveFloat = Field(1e-6, description="epsilon of the LayerNorms")

    def check(self, signature: ImageLabels) -> None:
        require_tiling(self.patch, image_sizes(signature))

    def build(
        self, signature: ImageLabels, device: "torch.device | str | None" = None
    ) -> "nn.Module":
        build = load("lit_attn.models.imagenet_vit:build")
        network: nn.Module = build(self, signature.shape, signature.classes, device)
        return network


class LocalViTConfig(Transformer):
    """ViT-S/16 with a depth-wise convolution inside the FFN, which the class token skips.

    The model of BeliefFormer's ImageNet experiment (LocalViT "hs", Li et al. 2021). The released
    code also builds and counts 3,924 parameters in each layer that nothing uses; they are left out.
    `positions: fixed` is the effect of that code on growing images: each change of size makes new
    positions, which the optimiser, built earlier, does not train.
    """

    takes = (ImageLabels,)

    activations = ("hard-swish",)

    kind: Literal["local-vit"] = "local-vit"
    positions: Literal["learned", "fixed"] = Field(
        "learned",
        description="learned; fixed: a change of the image size makes new positions that "
        "never train",
    )
    ffn: FFN | None = Field(
        FFN(width=1536, activation="hard-swish"),
        description="feed-forward network of every block; null (or `none`): no FFN and no "
        "norm of it",
    )
    drop_path: float = Field(
        0.1, ge=0, lt=1, description="drop-path rate of the last layer; linear from 0"
    )

    def check(self, signature: ImageLabels) -> None:
        require_tiling(self.patch, image_sizes(signature))

    def build(
        self, signature: ImageLabels, device: "torch.device | str | None" = None
    ) -> "nn.Module":
        build = load("lit_attn.models.local_vit:build")
        network: nn.Module = build(self, signature.shape, signature.classes, device)
        return network


class JiTConfig(Transformer):
    """JiT-B/16 (Li & He 2025) as a classifier: SwiGLU, RMSNorm, QK-norm, 2-D RoPE, adaLN-zero.

    Belief2 (section 4.2) states neither the condition of the adaLN nor the pooling. Here the
    condition is the mean of the embedded patches, and the last layer is averaged over patches.
    `ffn.width` is the hidden width of SwiGLU.
    """

    takes = (ImageLabels,)

    activations = ("swiglu",)

    kind: Literal["jit"] = "jit"
    dim: PositiveInt = Field(768, description="width of the residual stream")
    heads: PositiveInt = Field(12, description="attention heads of a block")
    ffn: FFN | None = Field(
        FFN(width=2048, activation="swiglu"),
        description="feed-forward network of every block; null (or `none`): no FFN and no "
        "norm of it",
    )
    bottleneck: PositiveInt = Field(
        128, description="width between the two maps of the patch embedding"
    )

    @model_validator(mode="after")
    def _heads_rotate_by_row_and_column(self) -> Self:
        if self.dim % 4:
            raise ValueError(f"dim: {self.dim} is not a multiple of 4, which each head needs")
        require_division(
            "heads",
            "heads of a width that is a multiple of 4",
            self.heads,
            self.dim // 4,
            f"dim {self.dim}",
        )
        return self

    def check(self, signature: ImageLabels) -> None:
        require_one_size(self.kind, signature)
        require_tiling(self.patch, [signature.shape[1:]])

    def build(
        self, signature: ImageLabels, device: "torch.device | str | None" = None
    ) -> "nn.Module":
        build = load("lit_attn.models.jit:build")
        network: nn.Module = build(self, signature.shape, signature.classes, device)
        return network


def image_sizes(signature: ImageLabels) -> list[tuple[int, int]]:
    """Return (height, width) of every size of training and evaluation images."""
    return [signature.shape[1:], *((size, size) for size in signature.training_sizes)]
