"""Segmenter (Strudel et al. 2021, arXiv:2105.05633): mmsegmentation's, with our attention.

It follows github.com/rstrudel/segmenter. `AttentionViT` and `AttentionMaskHead` are in the registry
of mmsegmentation, so a configuration file of mmengine can name them after
`custom_imports = dict(imports=["lit_attn.models.segmenter"])`.

Shapes: B batch, h x w patches of P pixels, d width, K classes. Images (B, 3, H, W) -> masks
(B, K, h, w).
"""

from typing import Any

import torch
from mmengine.config import ConfigDict
from mmengine.model import BaseModule, ModuleList
from mmseg.models import EncoderDecoder
from mmseg.models.decode_heads import SegmenterMaskTransformerHead
from mmseg.registry import MODELS
from pydantic import ValidationError
from timm.layers import Mlp, resample_abs_pos_embed
from timm.models import get_pretrained_cfg
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from lit_attn.attention.layer import attn_layer
from lit_attn.attention.network import number_layers
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models import vit
from lit_attn.models.layers import Device
from lit_attn.models.seeded_draws import by_name, copy_projections
from lit_attn.models.vit import ImageViTConfig, Transformer
from lit_attn.replace.timm_models import create_timm
from lit_attn.schema.errors import explain
from lit_attn.segmentation.label_masks import IGNORED
from lit_attn.segmentation.mmseg_preprocessor import Preprocessor
from lit_attn.segmentation.segmenter_config import SegmenterConfig

# Pixels are mapped from 0..255 to -1..1, as for the published weights.
MEAN = 127.5
STD = 127.5


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
    stride = model.stride or crop
    configuration = {
        "type": "EncoderDecoder",
        "data_preprocessor": preprocessor,
        "backbone": {"type": AttentionViT, "model": model, "crop": crop},
        "decode_head": {"type": AttentionMaskHead, "model": model, "num_classes": num_classes},
        "test_cfg": {"mode": "slide", "crop_size": (crop, crop), "stride": (stride, stride)},
    }
    with torch.device(device or torch.get_default_device()):
        network: EncoderDecoder = MODELS.build(ConfigDict(configuration))
    if torch.device(device or "cpu").type != "meta":
        # Each part by itself: mmengine's own loop over the parts logs every parameter.
        with by_name(network):
            network.backbone.init_weights()
            network.decode_head.init_weights()
    return network


def read_model(model: SegmenterConfig | dict[str, Any], part: str) -> SegmenterConfig:
    """Return a configuration, or the one that a mapping of its keys describes.

    The mapping may come from a configuration file of mmengine. Raises ConfigError, which begins
    with `part`, for a key or a value that YAML could not contain either.
    """
    if isinstance(model, SegmenterConfig):
        return model
    if isinstance(model, ConfigDict):
        model = model.to_dict()
    try:
        return SegmenterConfig.model_validate(model)
    except ValidationError as error:
        raise explain(error, f"{part}: model") from error


@MODELS.register_module()
class AttentionViT(BaseModule):
    """timm's vision transformer as a backbone: images (B, 3, H, W) -> one map (B, d, h, w).

    The final norm is applied and the class token dropped (Strudel et al. 2021, section 3.1). Images
    that the patches do not tile are padded on the right and at the bottom.

    `model` has the keys of `model: {kind: segmenter}` in YAML, such as `{"dim": 192, "attention":
    "belief2"}`. The learned positions are those of windows of `crop` x `crop` pixels.
    """

    def __init__(self, model: SegmenterConfig | dict[str, Any], crop: int) -> None:
        super().__init__()
        self.model = read_model(model, "AttentionViT")
        shared = {
            name: getattr(self.model, name) for name in Transformer.model_fields if name != "kind"
        }
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
            weights = self._read_weights(name)
            self.vit.load_state_dict(weights)
        except (KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"pretrained: '{name}': {reason}") from error

    def _read_weights(self, name: str) -> dict[str, Tensor]:
        """Return the weights of timm's model `name`, with positions resampled to the grid."""
        # The weights are copied, so they are read on the CPU whatever the default device is.
        with torch.device("cpu"):
            size = getattr(get_pretrained_cfg(name), "input_size", ())[1:]
            network = create_timm(name, size, {"num_classes": 0}, True, self.model.checkpoint)
        weights: dict[str, Tensor] = network.state_dict()
        # The released code interpolates linearly; timm's own reader has cubic polynomials.
        weights["pos_embed"] = resample_abs_pos_embed(
            weights["pos_embed"],
            list(self.vit.patch_embed.grid_size),
            interpolation="bilinear",
            antialias=False,
        )
        return weights

    def forward(self, images: Tensor) -> tuple[Tensor]:
        tokens = self.vit.forward_features(images)
        patches = tokens[:, self.vit.num_prefix_tokens :]
        height, width = images.shape[-2:]
        grid = self.vit.patch_embed.dynamic_feat_size((height, width))
        return (patches.transpose(1, 2).unflatten(-1, grid),)


@MODELS.register_module()
class AttentionMaskHead(SegmenterMaskTransformerHead):
    """mmsegmentation's mask transformer with our attention: (B, d, h, w) -> masks (B, K, h, w).

    The projections of patches and of classes start from N(0, 1/d), as in the published code;
    mmsegmentation's own head starts smaller. `model` is that of the backbone.
    """

    def __init__(self, model: SegmenterConfig | dict[str, Any], num_classes: int) -> None:
        model = read_model(model, "AttentionMaskHead")
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
        self.layers = ModuleList(_build_decoder_block(model) for _ in range(model.decoder_depth))
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


def _build_decoder_block(model: SegmenterConfig) -> nn.Module:
    """Return a transformer block of the mask head."""
    has_same_attention = model.decoder_attention == "same"
    spec = model.attention if has_same_attention else AttentionSpec()
    block = Block(
        model.dim,
        model.heads,
        qkv_bias=True,
        proj_drop=model.decoder_dropout,
        attn_drop=model.decoder_dropout,
        norm_layer=nn.LayerNorm,
        attn_layer=attn_layer(spec),
    )
    if model.ffn is None:
        return vit.AttentionBlock(block)
    block.mlp = Mlp(model.dim, model.ffn.width, drop=model.decoder_dropout)
    return block
