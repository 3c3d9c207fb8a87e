"""Small configuration files of mmsegmentation."""

from pathlib import Path
from typing import Any

CLASSES = 13
CROP = 32

PREPROCESSOR = {
    "type": "SegDataPreProcessor",
    "mean": [123.675, 116.28, 103.53],
    "std": [58.395, 57.12, 57.375],
    "bgr_to_rgb": True,
    "pad_val": 0,
    "seg_pad_val": 255,
    "size": (CROP, CROP),
}
VIT = {
    "type": "VisionTransformer",
    "img_size": (CROP, CROP),
    "patch_size": 8,
    "embed_dims": 16,
    "num_layers": 2,
    "num_heads": 2,
    "out_indices": (0, 1),
}
MIT = {
    "type": "MixVisionTransformer",
    "embed_dims": 8,
    "num_layers": [1, 1, 1, 1],
    "num_heads": [1, 2, 4, 8],
    "sr_ratios": [1, 1, 1, 1],
    "drop_path_rate": 0.1,
}
SWIN = {
    "type": "SwinTransformer",
    "pretrain_img_size": CROP,
    "embed_dims": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "window_size": 4,
    "out_indices": (0, 1),
    "strides": (4, 2),
}


def make_head(channels: int, index: int = -1, **changes: Any) -> dict[str, Any]:
    """Return a convolutional head with a batch norm over devices."""
    head = {
        "type": "FCNHead",
        "in_channels": channels,
        "in_index": index,
        "channels": 8,
        "num_convs": 1,
        "num_classes": CLASSES,
        "norm_cfg": {"type": "SyncBN", "requires_grad": True},
        "loss_decode": {"type": "CrossEntropyLoss", "use_sigmoid": False, "loss_weight": 1.0},
    }
    return head | changes


SEGFORMER_HEAD = make_head(0) | {
    "type": "SegformerHead",
    "in_channels": [8, 16, 32, 64],
    "in_index": [0, 1, 2, 3],
    # The smallest map of a window has one pixel, of which a batch norm has no variance.
    "norm_cfg": {"type": "GN", "num_groups": 2},
}
del SEGFORMER_HEAD["num_convs"]
MASK_HEAD = {
    "type": "SegmenterMaskTransformerHead",
    "in_channels": 16,
    "channels": 16,
    "num_classes": CLASSES,
    "num_layers": 1,
    "num_heads": 2,
    "embed_dims": 16,
    "dropout_ratio": 0.0,
    "loss_decode": {"type": "CrossEntropyLoss", "avg_non_ignore": True},
}
AUXILIARY_LOSS = {"type": "CrossEntropyLoss", "loss_weight": 0.4}
WHOLE = {"mode": "whole"}
SLIDE = {"mode": "slide", "crop_size": (CROP, CROP), "stride": (16, 16)}


def make_network(name: str) -> dict[str, Any]:
    """Return the `model` of a small network: a backbone with one or several heads."""
    network: dict[str, Any] = {"type": "EncoderDecoder", "data_preprocessor": PREPROCESSOR}
    if name == "vit":
        auxiliary = make_head(16, 0, loss_decode=AUXILIARY_LOSS)
        network |= {"backbone": VIT, "decode_head": make_head(16), "auxiliary_head": auxiliary}
        network["test_cfg"] = SLIDE
    elif name == "segformer":
        network |= {"backbone": MIT, "decode_head": SEGFORMER_HEAD, "test_cfg": WHOLE}
    elif name == "swin":
        auxiliary = [make_head(16, 0, loss_decode=AUXILIARY_LOSS), make_head(32, 1)]
        network |= {"backbone": SWIN, "decode_head": make_head(32), "auxiliary_head": auxiliary}
        network["test_cfg"] = WHOLE
    elif name == "segmenter":
        network |= {"backbone": VIT, "decode_head": MASK_HEAD, "test_cfg": SLIDE}
    else:
        raise KeyError(name)
    return network


NETWORKS = ("vit", "segformer", "swin", "segmenter")


def write_file(path: Path, network: dict[str, Any], before: str = "") -> Path:
    """Write a configuration file with `network` as its `model`, and return its path."""
    path.write_text(f"{before}\nmodel = {network!r}\n")
    return path
