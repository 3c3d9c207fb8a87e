"""Segmenter (Strudel et al. 2021, arXiv:2105.05633): mmsegmentation's, with our attention.

It follows github.com/rstrudel/segmenter.

Shapes: B batch, h x w patches of P pixels, d width, K classes. Images (B, 3, H, W) -> masks
(B, K, h, w).
"""

from functools import partial
from typing import Any

import torch
from mmengine.config import ConfigDict
from mmengine.model import BaseModule, ModuleList
from mmseg.models import EncoderDecoder, SegDataPreProcessor
from mmseg.models.decode_heads import SegmenterMaskTransformerHead
from mmseg.registry import MODELS
from timm.layers import Mlp, resample_abs_pos_embed
from timm.models import get_pretrained_cfg
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from lit_attn.attention.layer import attn_layer, number_layers
from lit_attn.attention.spec import AttentionSpec
from lit_attn.config.data.segmentation import IGNORED
from lit_attn.config.models.vision import ImageViTConfig, SegmenterConfig, Transformer
from lit_attn.models import vit
from lit_attn.models.external import create_timm
from lit_attn.models.layers import Device
from lit_attn.models.seeded_draws import by_name, copy_projections

# Pixels are mapped from 0..255 to -1..1, as for the published weights.
MEAN = STD = 127.5


def build(
    model: SegmenterConfig, image_shape: vit.Shape, num_classes: int, device: Device = None
) -> EncoderDecoder:
    """Build mmsegmentation's EncoderDecoder for windows of `image_shape` (3, H, H).

    The network maps normalised images to masks; its `loss` and `predict` are mmsegmentation's.
    Except on the meta device, it is initialised and pretrained weights are loaded. Raises
    ValueError if those weights are missing or do not fit.
    """
    crop = image_shape[-1]
    preprocessor = {
        "type": Preprocessor,
        "mean": [MEAN] * 3,
        "std": [STD] * 3,
        "bgr_to_rgb": True,
        "pad_val": 0,
        "seg_pad_val": IGNORED,
        "size": (crop, crop),
    }
    stride = (model.stride or crop,) * 2
    configuration = {
        "type": "EncoderDecoder",
        "data_preprocessor": preprocessor,
        "backbone": {"type": AttentionViT, "model": model, "crop": crop},
        "decode_head": {"type": AttentionMaskHead, "model": model, "num_classes": num_classes},
        "test_cfg": {"mode": "slide", "crop_size": (crop, crop), "stride": stride},
    }
    with torch.device(device or torch.get_default_device()):
        network: EncoderDecoder = MODELS.build(ConfigDict(configuration))
    if torch.device(device or "cpu").type != "meta":
        # Each part by itself: mmengine's own loop over the parts logs every parameter.
        with by_name(network):
            network.backbone.init_weights()
            network.decode_head.init_weights()
    return network


class Preprocessor(SegDataPreProcessor):
    """mmsegmentation's preprocessor with its mean and deviation as numbers.

    mmsegmentation stores them as buffers outside the state dict, which have no values in a network
    that is built on the meta device and then loads its weights. Here an empty buffer follows the
    type and the device of the network, and the numbers are written into its type in each call.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.mean, self.std
        self.register_buffer("place", torch.empty(0), persistent=False)

    @property
    def mean(self) -> Tensor:
        """Mean of the colours, (1, 1, 1) in the type of the network."""
        return self.place.new_full((1, 1, 1), MEAN)

    @property
    def std(self) -> Tensor:
        """Deviation of the colours, (1, 1, 1) in the type of the network."""
        return self.place.new_full((1, 1, 1), STD)


class AttentionViT(BaseModule):
    """timm's vision transformer as a backbone: images (B, 3, H, W) -> one map (B, d, h, w).

    The final norm is applied and the class token dropped (Strudel et al. 2021, section 3.1). Images
    that the patches do not tile are padded on the right and at the bottom.
    """

    def __init__(self, model: SegmenterConfig, crop: int) -> None:
        super().__init__()
        self.model = model
        shared = {name: getattr(model, name) for name in Transformer.model_fields if name != "kind"}
        encoder = ImageViTConfig(norm_eps=1e-5, **shared)
        self.vit = vit.build_image_vit(encoder, (3, crop, crop), 0, torch.get_default_device())

    def init_weights(self) -> None:
        """Draw initial values, or load timm's weights, with positions resampled to the grid.

        Parameters that the standard attention layer lacks keep their initial values, or copy W if
        their part is defined so. Raises ValueError if the weights are missing or do not fit.
        """
        name = self.model.pretrained
        if name is None:
            vit.initialise(self.vit, "timm")
            copy_projections(self.vit)
            return
        try:
            # The weights are copied, so they are read on the CPU whatever the default device is.
            with torch.device("cpu"):
                size = getattr(get_pretrained_cfg(name), "input_size", ())[1:]
                options = {"num_classes": 0}
                weights = create_timm(name, size, options, True, self.model.checkpoint).state_dict()
            grid = list(self.vit.patch_embed.grid_size)
            # The released code interpolates linearly; timm's own reader has cubic polynomials.
            resample = partial(resample_abs_pos_embed, interpolation="bilinear", antialias=False)
            self.vit.load_state_dict(weights | {"pos_embed": resample(weights["pos_embed"], grid)})
        except (KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"pretrained: '{name}': {reason}") from error

    def forward(self, images: Tensor) -> tuple[Tensor]:
        tokens = self.vit.forward_features(images)[:, self.vit.num_prefix_tokens :]
        grid = self.vit.patch_embed.dynamic_feat_size((images.shape[-2], images.shape[-1]))
        return (tokens.transpose(1, 2).unflatten(-1, grid),)


class AttentionMaskHead(SegmenterMaskTransformerHead):
    """mmsegmentation's mask transformer with our attention: (B, d, h, w) -> masks (B, K, h, w).

    The projections of patches and of classes start from N(0, 1/d), as in the published code;
    mmsegmentation's own head starts smaller.
    """

    def __init__(self, model: SegmenterConfig, num_classes: int) -> None:
        super().__init__(
            in_channels=model.dim,
            channels=model.dim,
            num_classes=num_classes,
            num_layers=0,
            num_heads=model.heads,
            embed_dims=model.dim,
            dropout_ratio=0.0,
            ignore_index=IGNORED,
            # The mean over labelled pixels; mmsegmentation's default divides by all pixels.
            loss_decode={"type": "CrossEntropyLoss", "avg_non_ignore": True},
        )
        is_same = model.decoder_attention == "same"
        blocks: list[nn.Module] = []
        for _ in range(model.decoder_depth):
            block = Block(
                model.dim,
                model.heads,
                qkv_bias=True,
                proj_drop=model.decoder_dropout,
                attn_drop=model.decoder_dropout,
                norm_layer=nn.LayerNorm,
                attn_layer=attn_layer(model.attention if is_same else AttentionSpec()),
            )
            if model.ffn is not None:
                block.mlp = Mlp(model.dim, model.ffn.width, drop=model.decoder_dropout)
            blocks.append(vit.AttentionBlock(block) if model.ffn is None else block)
        self.layers = ModuleList(blocks)
        number_layers(self.layers)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay with `decay: weights`: the class tokens."""
        return {"cls_emb"}

    def init_weights(self) -> None:
        """Draw truncated normals of deviation 0.02; W_p copies W if the attention is defined so."""
        super().init_weights()
        for projection in (self.patch_proj, self.classes_proj):
            nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
        copy_projections(self)
