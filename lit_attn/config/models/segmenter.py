"""The Segmenter (Strudel et al. 2021)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from lit_attn.config.models.base import FFN, ffn_field, require_tiling
from lit_attn.config.models.vision import Transformer
from lit_attn.config.signatures import ImageMasks
from lit_attn.extras import require_mmseg
from lit_attn.schema.base import Share, outside_identity

if TYPE_CHECKING:
    import torch
    from torch import nn


class SegmenterConfig(Transformer):
    """Segmenter with a mask transformer (Strudel et al. 2021); the defaults are Seg-T-Mask/16.

    `ffn` is the FFN of encoder and decoder. `stride` is the step of the evaluation window, which
    has the size of the training windows.
    """

    takes = (ImageMasks,)

    builder = ("segmenter:build", "shape", "classes")

    kind: Literal["segmenter"] = "segmenter"
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
    pretrained: str | None = Field(
        None, description="timm's name of the encoder's weights; null: random weights"
    )
    checkpoint: Path | None = outside_identity(
        None, "file of those weights; downloaded through timm if null"
    )

    @model_validator(mode="after")
    def _checkpoint_has_a_name(self) -> Self:
        if self.checkpoint is not None and self.pretrained is None:
            raise ValueError("checkpoint: needs `pretrained`, the name of the weights it holds")
        return self

    def check(self, signature: ImageMasks) -> None:
        crop = signature.shape[1]
        require_tiling(self.patch, [signature.shape[1:]], "windows", " (data.crop)")
        if self.stride is not None and self.stride > crop:
            raise ValueError(
                f"stride: {self.stride} leaves gaps between windows of {crop} (data.crop); {crop} "
                "at most"
            )

    def build(self, signature: Any, device: "torch.device | str | None" = None) -> "nn.Module":
        require_mmseg("model.kind")
        return super().build(signature, device)
