"""Segmenter (Strudel et al. 2021, arXiv:2105.05633), built of mmsegmentation's parts.

It follows github.com/rstrudel/segmenter.

Shapes: images (B, 3, H, W) -> masks (B, K, H / P, W / P) for K classes and patches of P pixels.
"""

from typing import TYPE_CHECKING

import torch

from lit_attn.config.data.segmentation import IGNORED
from lit_attn.config.models.segmenter import SegmenterConfig
from lit_attn.extras import require_mmseg
from lit_attn.models.seeded_draws import by_name

if TYPE_CHECKING:
    from mmseg.models import EncoderDecoder

# Pixels are mapped from 0..255 to -1..1, as for the published weights.
MEAN = STD = 127.5


def build(
    model: SegmenterConfig,
    image_shape: tuple[int, int, int],
    num_classes: int,
    device: torch.device | str | None = None,
) -> "EncoderDecoder":
    """Build mmsegmentation's EncoderDecoder for windows of `image_shape` (3, H, H).

    The network maps normalised images to masks; its `loss` and `predict` are mmsegmentation's.
    Except on the meta device, it is initialised and pretrained weights are loaded. Raises
    ConfigError if mmsegmentation or those weights are missing, or if the patches do not tile the
    window.
    """
    require_mmseg("model.kind")
    from mmengine.config import ConfigDict
    from mmseg.registry import MODELS

    with torch.device(device or torch.get_default_device()):
        network = MODELS.build(ConfigDict(configuration(model, image_shape[-1], num_classes)))
    if torch.device(device or "cpu").type != "meta":
        # Each part by itself: mmengine's own loop over the parts logs every parameter.
        with by_name(network):
            network.backbone.init_weights()
            network.decode_head.init_weights()
    return network


def configuration(model: SegmenterConfig, crop: int, num_classes: int) -> dict[str, object]:
    """Return the mmsegmentation configuration of `model` for training windows of `crop` pixels."""
    import lit_attn.models.mmseg_parts as parts

    ffn = None if model.ffn is None else model.ffn.width
    same = model.decoder_attention == "same"
    return {
        "type": "EncoderDecoder",
        "data_preprocessor": {
            "type": "mmseg.SegDataPreProcessor",
            "mean": [MEAN] * 3,
            "std": [STD] * 3,
            "bgr_to_rgb": True,
            "pad_val": 0,
            "seg_pad_val": IGNORED,
            "size": (crop, crop),
        },
        "backbone": {
            "type": parts.AttentionViT,
            "attention": model.attention,
            "img_size": crop,
            "patch_size": model.patch,
            "embed_dims": model.dim,
            "num_layers": model.depth,
            "num_heads": model.heads,
            "ffn": ffn,
            "drop_path_rate": model.drop_path,
            "pretrained": model.pretrained,
            "checkpoint": model.checkpoint,
        },
        "decode_head": {
            "type": parts.AttentionMaskHead,
            "num_classes": num_classes,
            "attention": model.attention if same else "standard",
            "in_channels": model.dim,
            "embed_dims": model.dim,
            "num_layers": model.decoder_depth,
            "num_heads": model.heads,
            "ffn": ffn,
            "drop_rate": model.decoder_dropout,
            "ignore_index": IGNORED,
        },
        "test_cfg": {
            "mode": "slide",
            "crop_size": (crop, crop),
            "stride": (model.stride or crop,) * 2,
        },
    }
