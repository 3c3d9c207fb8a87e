"""Backbone and mask head of the Segmenter with our attention, for mmsegmentation's registry.

Segmenter (Strudel et al. 2021, arXiv:2105.05633): github.com/rstrudel/segmenter. A plain
mmsegmentation configuration uses the two with
    custom_imports = dict(imports=["lit_attn.models.mmseg_parts"])
    backbone = dict(type="AttentionViT", attention="belief2", img_size=512, ...)
    decode_head = dict(type="AttentionMaskHead", attention="belief2", ...)
where `attention` is a preset's name, or the parts: dict(zz=True, residual=dict(kind="split")).

Shapes: B batch, h x w patches, d width, K classes.
"""

from pathlib import Path
from typing import Any

import torch
from mmengine.model import BaseModule, ModuleList
from mmseg.models.decode_heads import SegmenterMaskTransformerHead
from mmseg.registry import MODELS
from timm.layers import Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from lit_attn.attention.layer import attn_layer
from lit_attn.attention.spec import AttentionSpec, attention_spec
from lit_attn.config.models.base import FFN
from lit_attn.config.models.vision import ImageViTConfig
from lit_attn.models import vit
from lit_attn.models.external import create_timm
from lit_attn.models.seeded_draws import copy_projections
from lit_attn.models.vit import AttentionBlock, initialise

# Values of `attention:` in a YAML; mmengine's ConfigDict is a dict.
AttentionChoice = AttentionSpec | str | dict[str, Any]


@MODELS.register_module()
class AttentionViT(BaseModule):
    """timm's vision transformer as a backbone: images (B, 3, H, W) -> one map (B, d, h, w).

    The final norm is applied and the class token dropped (Strudel et al. 2021, section 3.1). The
    defaults are those of ViT-Ti/16. Images that the patches do not tile are padded on the right and
    at the bottom. `ffn` is the FFN's width; None leaves the FFN out. `pretrained` is timm's name of
    the weights that `init_weights` loads, from the file `checkpoint` if there is one.
    """

    def __init__(
        self,
        attention: AttentionChoice = "standard",
        img_size: int = 512,
        patch_size: int = 16,
        embed_dims: int = 192,
        num_layers: int = 12,
        num_heads: int = 3,
        ffn: int | None = 768,
        drop_path_rate: float = 0.1,
        pretrained: str | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        super().__init__()
        model = ImageViTConfig(
            attention=attention_spec(attention, "attention"),
            dim=embed_dims,
            depth=num_layers,
            heads=num_heads,
            patch=patch_size,
            ffn=None if ffn is None else FFN(width=ffn),
            drop_path=drop_path_rate,
            norm_eps=1e-5,
        )
        self.vit = vit.build_image_vit(
            model, (3, img_size, img_size), 0, torch.get_default_device()
        )
        self.pretrained = pretrained
        self.checkpoint = checkpoint

    def init_weights(self) -> None:
        """Draw initial values, or load timm's weights, with positions resampled to the grid.

        Parameters that the standard attention layer lacks keep their initial values, or copy W if
        their part is defined so. Raises ValueError if the weights are missing or do not fit.
        """
        if self.pretrained is None:
            initialise(self.vit, "timm")
            copy_projections(self.vit)
        else:
            # The weights are copied, so they are read on the CPU whatever the default device is.
            with torch.device("cpu"):
                size, options = self.vit.patch_embed.img_size, {"num_classes": 0}
                published = create_timm(self.pretrained, size, options, True, self.checkpoint)
            try:
                self.vit.load_state_dict(published.state_dict())
            except RuntimeError as error:
                reason = " ".join(str(error).split())[:200]
                raise ValueError(f"pretrained: '{self.pretrained}': {reason}") from error

    def forward(self, images: Tensor) -> tuple[Tensor]:
        tokens = self.vit.forward_features(images)[:, self.vit.num_prefix_tokens :]
        grid = self.vit.patch_embed.dynamic_feat_size((images.shape[-2], images.shape[-1]))
        return (tokens.transpose(1, 2).unflatten(-1, grid),)


@MODELS.register_module()
class AttentionMaskHead(SegmenterMaskTransformerHead):
    """mmsegmentation's mask transformer with our attention: (B, d, h, w) -> masks (B, K, h, w).

    The defaults are those of Seg-T-Mask/16. The projections of patches and of classes start from
    N(0, 1/d), as in the published code; mmsegmentation's own head starts smaller.
    """

    def __init__(
        self,
        num_classes: int,
        attention: AttentionChoice = "standard",
        in_channels: int = 192,
        embed_dims: int = 192,
        num_layers: int = 2,
        num_heads: int = 3,
        ffn: int | None = 768,
        drop_rate: float = 0.1,
        ignore_index: int = 255,
    ) -> None:
        super().__init__(
            in_channels=in_channels,
            channels=embed_dims,
            num_classes=num_classes,
            num_layers=0,
            num_heads=num_heads,
            embed_dims=embed_dims,
            dropout_ratio=0.0,
            ignore_index=ignore_index,
            # The mean over labelled pixels; mmsegmentation's default divides by all pixels.
            loss_decode={"type": "CrossEntropyLoss", "avg_non_ignore": True},
        )
        layer = attn_layer(attention)
        blocks: list[nn.Module] = []
        for _ in range(num_layers):
            block = Block(
                embed_dims,
                num_heads,
                qkv_bias=True,
                proj_drop=drop_rate,
                attn_drop=drop_rate,
                norm_layer=nn.LayerNorm,
                attn_layer=layer,
            )
            if ffn is not None:
                block.mlp = Mlp(embed_dims, ffn, drop=drop_rate)
            blocks.append(AttentionBlock(block) if ffn is None else block)
        self.layers = ModuleList(blocks)

    def init_weights(self) -> None:
        """Draw truncated normals of deviation 0.02; W_p copies W if the attention is defined so."""
        super().init_weights()
        for projection in (self.patch_proj, self.classes_proj):
            nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
        copy_projections(self)
