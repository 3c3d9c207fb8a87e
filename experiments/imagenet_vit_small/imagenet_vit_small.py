"""Plug-in for the images and the ViT of big_vision, in its configuration vit_s16_i1k.py.

The study `dcmha-imagenet` names this file under `parts`. It adds data and a model. big_vision
computes with TensorFlow; here Pillow gives the same images, up to rounding of a value by one
(docs/parity.md). Its RandAugment is that of EfficientNet's TensorFlow code.

Source: github.com/google-research/big_vision at 0127fb6 (docs/setups.md, section 7).
"""

import hashlib
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from pydantic import Field, PositiveInt
from torch import nn

from lit_attn.data.augment.timm_augmentation import Range
from lit_attn.data.image_files import ImageFileData, ImageFiles
from lit_attn.data.image_folders import ClassFolders, list_folders
from lit_attn.data.image_lists import Files
from lit_attn.data.module import numpy_generator
from lit_attn.models.base import FFN, ffn_field
from lit_attn.models.seeded_draws import draw_parameters
from lit_attn.models.vit import ImageViTConfig, Transformer
from lit_attn.schema.base import consistency_check

Draw = Callable[[Image.Image], tuple[int, int, int, int]]
"""Function that draws a window: top, left, height, width."""

GREY = (128, 128, 128)
LAYERS = 2  # Operations of each image.
# Strengths of the operations at magnitude 10 of 10.
ENHANCED = 1.9
ADDED = 110
THRESHOLD = 128
HALF_SQUARE = 40
DEGREES = 30
SHEAR = 0.3
SHIFT = 100
BITS = 4


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

    def build(self, seed: int, device: torch.device) -> "BigVisionImageData":
        return BigVisionImageData(self, seed, device)

    def list_files(self) -> dict[str, Files]:
        return list_images(self)

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

    def build(self, signature: Any, device: torch.device | str | None = None) -> nn.Module:
        options = {name: getattr(self, name) for name in Transformer.model_fields if name != "kind"}
        vit = ImageViTConfig(pool="average", positions="sincos", init="flax", **options)
        return add_tanh_layer(vit.build(signature, device))


class BigVisionImageData(ImageFileData):
    """Class folders whose images are transformed as in big_vision."""

    def __init__(self, data: ImageFiles, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        for size, transform in self.train.transforms.items():
            draw = partial(draw_window, data.augment.area, data.augment.aspect)
            # A step with `ops` is the RandAugment of timm.
            kept = [step for step in transform.transforms[1:] if not hasattr(step, "ops")]
            window = partial(crop_window, draw, size)
            transform.transforms = [window, kept[0], augment, *kept[1:]]
        for reader in self.evaluated.values():
            for size, transform in reader.transforms.items():
                short = round(size / data.crop_share)
                transform.transforms[:2] = [partial(resize_area, short), partial(crop, size)]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return (images, targets); a training batch, which has its step, is mixed here."""
        pixels, labels, *step = batch
        if not self.data.augment.is_mixed or not step:
            return pixels, labels
        alpha = self.data.augment.mixup
        share = numpy_generator(self.seed, "mix", *step).beta(alpha, alpha)
        share = max(share, 1 - share)
        targets = nn.functional.one_hot(labels, self.data.classes).to(pixels.dtype)
        mixed_pixels = share * pixels + (1 - share) * pixels.roll(1, 0)
        mixed_targets = share * targets + (1 - share) * targets.roll(1, 0)
        return mixed_pixels, mixed_targets


def list_images(data: Any) -> dict[str, Files]:
    """Return the images of "train", "test" and, if any are held out, "val".

    Held out are the last ones in the order of TensorFlow Datasets, which sorts the images of
    ImageNet by the MD5 digest of the split's name and the file's name.
    """
    files = list_folders(data)
    if data.validation:
        # The package has held out as many other images.
        train = files["train"]
        val = files["val"]
        names = np.concatenate([train.names, val.names])
        labels = np.concatenate([train.labels, val.labels])
        digests = []
        for path in names.tolist():
            name = path.split(b"/")[-1]
            digests.append(hashlib.md5(b"train" + name).digest())
        order = sorted(range(len(names)), key=digests.__getitem__)
        is_held_out = np.zeros(len(names), bool)
        is_held_out[order[-data.validation :]] = True
        for split, rows in (("train", ~is_held_out), ("val", is_held_out)):
            files[split] = Files(train.folder, names[rows], labels[rows])
    return files


def draw_window(area: Range, aspects: Range, image: Image.Image) -> tuple[int, int, int, int]:
    """Draw a crop as TensorFlow does: top, left, a uniform height, and width."""
    width, height = image.size
    aspect = random.uniform(*aspects)
    least = round(math.sqrt(area[0] * width * height / aspect))
    most = round(math.sqrt(area[1] * width * height / aspect))
    most = min(most, height, int((width + 0.5) / aspect))
    tall = random.randint(min(least, most), most)
    wide = min(width, round(tall * aspect))
    top = random.randrange(max(1, height - tall))
    left = random.randrange(max(1, width - wide))
    return top, left, tall, wide


def crop_window(draw: Draw, size: int, image: Image.Image) -> Image.Image:
    """Cut the window that `draw` returns for an image, and resize it without antialiasing."""
    top, left, tall, wide = draw(image)
    window = image.crop((left, top, left + wide, top + tall))
    extent = (0, 0, wide, tall)
    return window.transform((size, size), Image.Transform.EXTENT, extent, BILINEAR)


def resize_area(short: int, image: Image.Image) -> Image.Image:
    """Resize the short side to `short` pixels; a new pixel is the mean of the area it covers."""
    pixels = np.asarray(image, np.float64)
    scale = short / min(image.size)
    for axis in (0, 1):
        count = pixels.shape[axis]
        places = np.arange(count)
        edges = np.linspace(0, count, round(count * scale) + 1)[:, None]
        covered = np.minimum(edges[1:], places + 1) - np.maximum(edges[:-1], places)
        shares = covered.clip(0) * (len(edges) - 1) / count
        pixels = np.moveaxis(np.tensordot(shares, pixels, (1, axis)), 0, axis)
    # A mean that is an integer stays one.
    return Image.fromarray((pixels + 1e-6).astype(np.uint8))


def crop(size: int, image: Image.Image) -> Image.Image:
    """Return the central square."""
    width, height = image.size
    left = (width - size) // 2
    top = (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def augment(image: Image.Image) -> Image.Image:
    """Apply RandAugment's operations, each drawn from all of them, with signs."""
    for name in random.choices(list(OPERATIONS), k=LAYERS):
        image = OPERATIONS[name](image, random.choice((-1, 1)))
    return image


def enhance(kind: Callable[..., ImageEnhance._Enhance], image: Image.Image, _: int) -> Image.Image:
    """Extrapolate from the degenerate image of an enhancement of Pillow beyond the image."""
    return kind(image).enhance(ENHANCED)


def enhance_contrast(image: Image.Image, _: int) -> Image.Image:
    """Extrapolate from a grey image whose value is the number of pixels over 256.

    The released code means the mean of the image, and adds the counts of its histogram instead.
    """
    value = min(255, image.width * image.height // 256)
    return Image.blend(Image.new("RGB", image.size, (value,) * 3), image, ENHANCED)


def add_below(image: Image.Image, _: int) -> Image.Image:
    """Add to the values below a threshold (SolarizeAdd)."""
    table = list(range(256))
    for value in range(THRESHOLD):
        table[value] = min(255, value + ADDED)
    return image.point(table * 3)


def cut_square(image: Image.Image, _: int) -> Image.Image:
    """Fill a square with grey whose centre is anywhere in the image (Cutout)."""
    y = random.randrange(image.height)
    x = random.randrange(image.width)
    cut = image.copy()
    cut.paste(GREY, (x - HALF_SQUARE, y - HALF_SQUARE, x + HALF_SQUARE, y + HALF_SQUARE))
    return cut


def rotate(image: Image.Image, sign: int) -> Image.Image:
    """Rotate around the centre."""
    return image.rotate(sign * DEGREES, NEAREST, fillcolor=GREY)


def warp(matrix: tuple[float, ...], image: Image.Image, sign: int) -> Image.Image:
    """Map coordinates by the identity plus the signed `matrix` (2 rows, 3 columns)."""
    # Halves are rounded up as in TensorFlow; Pillow computes coordinates in units of 1 / 65,536.
    identity = (1, 0, 1e-3, 0, 1, 1e-3)
    values = [one + sign * value for one, value in zip(identity, matrix, strict=True)]
    return image.transform(image.size, Image.Transform.AFFINE, values, NEAREST, fillcolor=GREY)


BILINEAR, NEAREST = Image.Resampling.BILINEAR, Image.Resampling.NEAREST
Operation = Callable[[Image.Image, int], Image.Image]
OPERATIONS: dict[str, Operation] = {
    "AutoContrast": lambda image, _: ImageOps.autocontrast(image),
    "Equalize": lambda image, _: ImageOps.equalize(image),
    "Invert": lambda image, _: ImageOps.invert(image),
    "Rotate": rotate,
    "Posterize": lambda image, _: ImageOps.posterize(image, BITS),
    # The threshold of 256 becomes 0 in eight bits, so every value is inverted.
    "Solarize": lambda image, _: ImageOps.invert(image),
    "SolarizeAdd": add_below,
    "Color": partial(enhance, ImageEnhance.Color),
    "Contrast": enhance_contrast,
    "Brightness": partial(enhance, ImageEnhance.Brightness),
    "Sharpness": partial(enhance, ImageEnhance.Sharpness),
    # Coordinates of TensorFlow are those of pixels' corners, coordinates of Pillow of centres.
    "ShearX": partial(warp, (0, SHEAR, -SHEAR / 2, 0, 0, 0)),
    "ShearY": partial(warp, (0, 0, 0, SHEAR, 0, -SHEAR / 2)),
    "TranslateX": partial(warp, (0, 0, SHIFT, 0, 0, 0)),
    "TranslateY": partial(warp, (0, 0, 0, 0, 0, SHIFT)),
    "Cutout": cut_square,
}


def add_tanh_layer(network: nn.Module) -> nn.Module:
    """Put a Linear (LeCun-normal, without an initial bias) and tanh before the classifier."""
    # timm takes a second to import.
    from timm.layers import lecun_normal_
    from timm.models.vision_transformer import VisionTransformer

    assert isinstance(network, VisionTransformer)
    layer = nn.Linear(
        network.embed_dim, network.embed_dim, device=next(network.parameters()).device
    )

    def fill() -> None:
        lecun_normal_(layer.weight)
        nn.init.zeros_(layer.bias)

    draw_parameters(layer, fill)
    network.fc_norm = nn.Sequential(layer, nn.Tanh())
    return network
