"""Vision transformers for images of all sizes (docs/setups.md), and the Segmenter."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lit_attn.extras import require_mmseg
from lit_attn.models import base
from lit_attn.models.base import FFN, FFN_MEANING, PackageModel, ffn_field
from lit_attn.schema.base import Share, consistency_check, outside_identity
from lit_attn.signatures import ImageLabels, ImageMasks, ImageTargets, Signature

if TYPE_CHECKING:
    import torch
    from torch import nn


class Transformer(PackageModel):
    """Base of the models of images; the defaults are those of ViT-S/16."""

    has_one_size: ClassVar[bool] = False
    """True for a model whose positions are for images of one size."""
    takes: ClassVar[tuple[type[Signature], ...]] = (ImageLabels, ImageTargets)

    dim: PositiveInt = Field(384, description="width of the residual stream")
    depth: PositiveInt = Field(12, description="number of blocks")
    heads: PositiveInt = Field(6, description="attention heads of a block")
    patch: PositiveInt = Field(16, description="side of a patch in pixels")
    ffn: FFN | None = ffn_field(1536)
    drop_path: Share = Field(0.0, description="drop-path rate of the last layer; linear from 0")

    @consistency_check
    def _heads_divide(self) -> None:
        """Refuse a number of heads that the width or the attention cannot have."""
        base.require_division("heads", "heads", self.heads, self.dim, f"dim {self.dim}")
        base.require_heads(self.attention, self.heads, self.depth)

    def check(self, signature: Any) -> None:
        """Raise ValueError if the patches do not tile images of every size."""
        if self.has_one_size:
            base.require_one_size(self.kind, signature)
        final_size = signature.shape[1:]
        training_sizes = [(side, side) for side in getattr(signature, "training_sizes", ())]
        base.require_tiling(self.patch, [final_size, *training_sizes])


class NormedTransformer(Transformer):
    """Base of the vision transformers whose heads can have norms of q and k."""

    qk_norm: bool = Field(False, description="RMSNorm with weight on each head's q and k")
    qk_norm_eps: PositiveFloat = Field(1e-6, description="epsilon of the norms of `qk_norm`")

    @consistency_check
    def _norms_have_an_effect(self) -> None:
        """Refuse the epsilon of norms that the heads do not have."""
        if not self.qk_norm and self.qk_norm_eps != 1e-6:
            raise ValueError("qk_norm_eps: needs `qk_norm: true`")


class ImageViTConfig(NormedTransformer, kind="image-vit"):
    """timm's VisionTransformer for images of any size, with positions resampled to each size.

    The defaults are DeiT-S/16 (Touvron et al. 2021). With `pool: average`, which drops the class
    token, `positions: sincos` (fixed), `init: flax` and `ffn.activation: gelu-tanh` it is the
    ViT-S/16 of Beyer et al. 2022.
    """

    activations = ("gelu", "gelu-tanh")
    builder = ("lit_attn.models.vit:build_image_vit", "shape", "outputs")
    pool: Literal["token", "average"] = Field(
        "token", description="input of the classifier: class token, or average of the patches"
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


class ViTConfig(NormedTransformer, kind="vit"):
    """Pre-norm vision transformer with a class token, for images of one size."""

    has_one_size = True
    builder = ("lit_attn.models.vit:build", "shape", "outputs")
    dim: PositiveInt = Field(description="width of the residual stream")
    depth: PositiveInt = Field(description="number of blocks")
    heads: PositiveInt = Field(description="attention heads of a block")
    patch: PositiveInt = Field(description="side of a patch in pixels")
    ffn: FFN | None = Field(description=FFN_MEANING)
    qkv_bias: bool = Field(False, description="biases of the projections to q, k and v")
    patchify: Literal["plain", "shifted"] = Field(
        "plain", description="shifted: shifted patch tokenisation (SPT), four one-pixel shifts"
    )
    local_self_attention: bool = Field(
        False, description="LSA: learned temperature per layer, no token attends to itself"
    )
    dropout: Share = Field(0.0, description="dropout rate after W and inside the FFN")
    embed_dropout: Share = Field(0.0, description="dropout rate of the embeddings")
    drop_path: Share = Field(
        0.0, description="drop-path rate of the last layer (linear) or of all layers (constant)"
    )
    drop_path_schedule: Literal["linear", "constant"] = Field(
        "linear", description="drop-path rate over the layers: linear from 0, or constant"
    )
    init: Literal["xavier", "torch", "timm"] = Field(
        "timm", description="initial values of the Linears; timm: normal, deviation 0.02"
    )

    @consistency_check
    def _fits_local_self_attention(self) -> None:
        """Refuse local self-attention of a similarity without logits."""
        if not self.local_self_attention:
            return
        for spec in self.attention.mechanisms:
            if spec.mixer is not None:
                raise ValueError("local_self_attention: a layer of `kind: module` has no logits")
            if not spec.similarity.has_logits:
                raise ValueError(
                    f"local_self_attention: {spec.similarity.kind} keys never form the logits that"
                    " it would mask"
                )


class SegmenterConfig(Transformer, kind="segmenter"):
    """Segmenter with a mask transformer (Strudel et al. 2021); the defaults are Seg-T-Mask/16.

    `ffn` is the FFN of both parts. The evaluation window has the size of the training windows.
    """

    takes = (ImageMasks,)
    builder = ("lit_attn.models.segmenter:build", "shape", "classes")
    dim: PositiveInt = Field(192, description="width of the residual stream")
    heads: PositiveInt = Field(3, description="attention heads of a block")
    ffn: FFN | None = ffn_field(768)
    drop_path: Share = Field(0.1, description="drop-path rate of the last encoder layer; linear")
    decoder_depth: PositiveInt = Field(2, description="blocks of the mask transformer")
    decoder_attention: Literal["same", "standard"] = Field(
        "same", description="same: the decoder has the attention of the encoder"
    )
    decoder_dropout: Share = Field(0.1, description="dropout rate of the decoder")
    stride: PositiveInt | None = Field(None, description="window step in pixels; null: window size")
    pretrained: str | None = Field(None, description="timm's name of encoder weights; null: random")
    checkpoint: Path | None = outside_identity(None, "file of those weights; null: timm's download")

    @consistency_check
    def _decoder_has_one_mechanism(self) -> None:
        """Refuse layers that differ in the decoder, which has another number of layers."""
        if self.attention.layers is not None and self.decoder_attention == "same":
            raise ValueError(
                "decoder_attention: attention.layers are those of the encoder; set it to standard"
            )

    @consistency_check
    def _checkpoint_has_a_name(self) -> None:
        """Refuse a file of weights without timm's name of the weights."""
        if self.checkpoint is not None and self.pretrained is None:
            raise ValueError("checkpoint: needs `pretrained`, the name of the weights it holds")

    def check(self, signature: ImageMasks) -> None:
        crop = signature.shape[1]
        base.require_tiling(self.patch, [signature.shape[1:]], "windows", " (data.crop)")
        if self.stride is not None and self.stride > crop:
            raise ValueError(
                f"stride: {self.stride} leaves gaps between windows of {crop} (data.crop);"
                f" {crop} at most"
            )

    def exempt_parameters(self) -> tuple[str, ...]:
        return ("cls_emb", "cls_token", "pos_embed")

    def build(self, signature: Any, device: "torch.device | str | None" = None) -> "nn.Module":
        require_mmseg("model.kind")
        return super().build(signature, device)
