"""Configuration of the Segmenter, apart from its network, which needs mmsegmentation."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt
from torch import nn

from lit_attn.extras import require_mmseg
from lit_attn.models.base import FFN, ffn_field, require_tiling
from lit_attn.models.layers import Device
from lit_attn.models.vit import Shape, Transformer
from lit_attn.schema.base import Share, consistency_check, load, outside_identity
from lit_attn.signatures import ImageMasks


def build_segmenter(
    model: "SegmenterConfig", image_shape: Shape, num_classes: int, device: Device
) -> nn.Module:
    """Build the network; mmsegmentation, which is optional, is imported here."""
    build = load("lit_attn.segmentation.segmenter:build")
    network: nn.Module = build(model, image_shape, num_classes, device)
    return network


class SegmenterConfig(Transformer, kind="segmenter"):
    """Segmenter with a mask transformer (Strudel et al. 2021); the defaults are Seg-T-Mask/16.

    `ffn` is the FFN of both parts. The evaluation window has the size of the training windows.
    """

    takes = (ImageMasks,)
    builder = (build_segmenter, "shape", "classes")
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
        require_tiling(self.patch, [signature.shape[1:]], "windows", " (data.crop)")
        if self.stride is not None and self.stride > crop:
            raise ValueError(
                f"stride: {self.stride} leaves gaps between windows of {crop} (data.crop);"
                f" {crop} at most"
            )

    def exempt_parameters(self) -> tuple[str, ...]:
        return ("cls_emb", "cls_token", "pos_embed")

    def build(self, signature: Any, device: Device = None) -> nn.Module:
        require_mmseg("model.kind")
        return super().build(signature, device)
