"""The Segmenter (Strudel et al. 2021)."""

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from lit_attn.config.models.base import FFN
from lit_attn.config.models.imagenet import ImageViTConfig, Transformer
from lit_attn.schema.base import outside_identity


class SegmenterConfig(Transformer):
    """Segmenter with a mask transformer (Strudel et al. 2021); as it stands, Seg-T-Mask/16.

    `ffn` is the FFN of encoder and decoder; `stride` is the step of the evaluation window, whose
    size is the training crop's.
    """

    kind: Literal["segmenter"] = "segmenter"
    dim: PositiveInt = 192
    heads: PositiveInt = 3
    ffn: FFN | None = FFN(width=768)
    drop_path: float = Field(0.1, ge=0, lt=1, description="of the encoder's last layer")
    decoder_depth: PositiveInt = 2
    decoder_attention: Literal["same", "standard"] = Field(
        "same", description="same: the decoder has the attention of the encoder"
    )
    decoder_dropout: float = Field(0.1, ge=0, lt=1)
    stride: PositiveInt | None = Field(None, description="pixels; null: the window's own size")
    pretrained: str | None = Field(
        None, description="timm's name of the encoder's weights; null: trained from scratch"
    )
    checkpoint: Path | None = outside_identity(
        None, "file that holds those weights; null: timm's hub, which caches them"
    )

    @model_validator(mode="after")
    def _checkpoint_has_a_name(self) -> "SegmenterConfig":
        if self.checkpoint is not None and self.pretrained is None:
            raise ValueError("checkpoint: needs `pretrained`, the name of the weights it holds")
        return self

    @property
    def encoder(self) -> ImageViTConfig:
        """The encoder's transformer, without a classifier to its name."""
        return ImageViTConfig(
            attention=self.attention,
            ffn=self.ffn,
            dim=self.dim,
            depth=self.depth,
            heads=self.heads,
            patch=self.patch,
            drop_path=self.drop_path,
            norm_eps=1e-5,
        )
