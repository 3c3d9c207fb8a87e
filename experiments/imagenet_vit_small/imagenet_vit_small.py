"""Plug-in for the images and the ViT of big_vision, in its configuration vit_s16_i1k.py.

The study `dcmha-imagenet` names this file under `parts`. It adds data and a model; their torch code
is in imagenet_vit_small_images.py, which a cell imports when it is built.

Source: github.com/google-research/big_vision at 0127fb6 (docs/setups.md, section 7).
"""

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, PositiveInt

from lit_attn.data.base import method
from lit_attn.data.image_folders import ClassFolders
from lit_attn.models.base import FFN, ffn_field
from lit_attn.models.vit import ImageViTConfig, Transformer
from lit_attn.schema.base import consistency_check

if TYPE_CHECKING:
    import torch
    from torch import nn


class BigVisionImages(ClassFolders, kind="big-vision-imagenet"):
    """ImageNet (ILSVRC 2012) as big_vision reads it with TensorFlow.

    A training image is a random window of a uniform height, resized without antialiasing and
    mirrored; then RandAugment applies two of its 16 operations at strength 10. MixUp mixes an image
    with the one before it, and all of a batch in one ratio of at least a half. The short side of an
    evaluated image is resized by means over areas. `validation` holds out the last training images
    in the order of TensorFlow Datasets.
    """

    runs_foreign_code = False  # Tests try it out, so a dry run need not.
    has_val_files = False
    name: str = Field("imagenet", description="name of the data set in identities and tables")
    classes: PositiveInt = Field(1000, description="number of classes")

    build: ClassVar = method("imagenet_vit_small_images:BigVisionImageData")
    list_files: ClassVar = method("imagenet_vit_small_images:list_images")

    @consistency_check
    def _has_no_key_without_effect(self) -> None:
        keys = {
            f"augment.{key}": getattr(self.augment, key) for key in ("crop", "policy", "cutmix")
        }
        keys["interpolation"] = self.interpolation
        for key, default in zip(keys, ("resized", None, 0.0, "bicubic"), strict=True):
            if keys[key] != default:
                text = "has no effect on big-vision-imagenet: remove it, or use `kind: imagenet`"
                raise ValueError(f"{key}: {keys[key]!r} {text}")


class BigVisionViT(Transformer, kind="big-vision-vit"):
    """ViT with fixed positions, and a Linear and tanh between the mean of patches and the head."""

    runs_foreign_code = False  # Tests try it out, so a dry run need not.
    activations = ("gelu-tanh",)
    builder = ImageViTConfig.builder
    ffn: FFN | None = ffn_field(1536, "gelu-tanh")

    def build(self, signature: Any, device: "torch.device | str | None" = None) -> "nn.Module":
        from imagenet_vit_small_images import add_tanh_layer

        options = {name: getattr(self, name) for name in Transformer.model_fields if name != "kind"}
        vit = ImageViTConfig(pool="average", positions="sincos", init="flax", **options)
        return add_tanh_layer(vit.build(signature, device))
