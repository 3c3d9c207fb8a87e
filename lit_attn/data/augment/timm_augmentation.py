"""timm's augmentation: its keys, its transforms of one picture, and its mixing of a batch.

The transforms have two changes: posterising to 0 bits gives black, and a centre crop is that of
JiT's code. Batches are mixed by MixUp and CutMix with the random numbers of timm's `Mixup`: the
first image with the last one, the second with the last but one, and so on.

Shapes: images (B, C, H, W) float, labels (B,), targets (B, classes).
"""

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from PIL import Image
from pydantic import Field, PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from lit_attn.schema.base import Config, consistency_check
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    from timm.data.auto_augment import AugmentOp

Range = tuple[PositiveFloat, PositiveFloat]


class TimmAugmentation(Config):
    """timm's augmentation of a training image; timm applies the fields in their order."""

    crop: Literal["resized", "centre"] = Field(
        "resized", description="a random area of the image (resized) or its centre"
    )
    area: Range = Field((0.08, 1.0), description="range of the image's share in a random crop")
    aspect: Range = Field((3 / 4, 4 / 3), description="range of the aspect ratio of a random crop")
    flip: float = Field(0.5, ge=0, le=1, description="probability of mirroring left-right")
    policy: str | None = Field(
        None,
        pattern=r"^(rand|augmix|original|originalr|v0|v0r|3a)(-[a-z]+[0-9.]*)*$",
        description="timm's name of the policy, as rand-m9-mstd0.5-inc1; null: none",
    )
    erasing: float = Field(0.0, ge=0, le=1, description="probability of random erasing with noise")
    mixup: float = Field(0.0, ge=0, description="alpha of MixUp's Beta(alpha, alpha); 0: none")
    cutmix: float = Field(0.0, ge=0, description="alpha of CutMix's Beta(alpha, alpha); 0: none")

    @consistency_check
    def _ranges_are_not_empty(self) -> None:
        """Refuse ranges whose lower end is above the upper one."""
        for name in ("area", "aspect"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name}: the range from {low} to {high} is empty")

    @property
    def is_mixed(self) -> bool:
        """True if MixUp or CutMix makes targets probabilities."""
        return self.mixup > 0 or self.cutmix > 0


class Pictures(Protocol):
    """Settings of a data set with which its pictures become tensors."""

    @property
    def interpolation(self) -> str:
        """Method of resizing, "bilinear" or "bicubic"."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel, 0 to 1."""

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel, 0 to 1."""

    @property
    def crop_share(self) -> float:
        """Share of the evaluation crop's side in the short side of the resized picture."""

    @property
    def augment(self) -> TimmAugmentation:
        """Augmentation of training pictures."""


def make_evaluation_transform(data: Pictures, size: int) -> Any:
    """Return the transform of an evaluated picture to a tensor (3, size, size)."""
    from timm.data import create_transform

    transform = create_transform(
        size,
        interpolation=data.interpolation,
        mean=data.mean,
        std=data.std,
        crop_pct=data.crop_share,
    )
    if data.augment.crop == "centre":
        # The first two steps resize the picture and crop it.
        transform.transforms[:2] = [partial(crop_centre, data, size, data.crop_share)]
    return transform


def make_training_transform(data: Pictures, size: int) -> Any:
    """Return the transform of a training picture; raise ConfigError for an unknown policy."""
    from timm.data import create_transform

    augment = data.augment
    try:
        transform = create_transform(
            size,
            is_training=True,
            interpolation=data.interpolation,
            mean=data.mean,
            std=data.std,
            scale=augment.area,
            ratio=augment.aspect,
            hflip=augment.flip,
            color_jitter=0.0,
            auto_augment=augment.policy,
            re_prob=augment.erasing,
            re_mode="pixel",
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise ConfigError(
            f"data.augment.policy: timm does not know '{augment.policy}': {error}"
        ) from error
    for step in transform.transforms:
        for operation in _list_operations(step):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = posterize
    if augment.crop == "centre":
        # The first step crops a random area.
        transform.transforms[0] = partial(crop_centre, data, size, 1.0)
    return transform


def _list_operations(step: Any) -> "list[AugmentOp]":
    """Return the operations of a policy of timm; nothing for another step."""
    from timm.data import auto_augment

    if isinstance(step, auto_augment.RandAugment | auto_augment.AugMixAugment):
        return list(step.ops)
    if isinstance(step, auto_augment.AutoAugment):
        return [operation for sub_policy in step.policy for operation in sub_policy]
    return []


def crop_centre(data: Pictures, size: int, share: float, image: Image.Image) -> Image.Image:
    """Return the central square after resizing the short side to size / share, as JiT's code."""
    short_side = math.floor(size / share)
    while min(image.size) >= 2 * short_side:
        halved = (image.width // 2, image.height // 2)
        image = image.resize(halved, Image.Resampling.BOX)
    scale = short_side / min(image.size)
    scaled = (round(image.width * scale), round(image.height * scale))
    image = image.resize(scaled, Image.Resampling[data.interpolation.upper()])
    left = (image.width - size) // 2
    top = (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Return `image` with its highest `bits` bits per channel; black for 0 bits.

    timm asks for 0 bits at the largest magnitude, which random magnitudes reach; Pillow raises.
    """
    return image.point(lambda value: value & (256 - 2 ** (8 - bits)))


def mix_batch(
    images: Tensor, labels: Tensor, classes: int, augment: TimmAugmentation, seed: int
) -> tuple[Tensor, Tensor]:
    """Mix `images` in place by MixUp or CutMix; return them and their targets.

    The draws are in the order of timm: whether to mix (always), MixUp or CutMix with equal
    probability where both have an alpha, the weight, and the box of CutMix.
    """
    generator = np.random.RandomState(seed)
    # timm draws whether a batch is mixed. Its probability is 1 here.
    generator.rand()
    is_cutmix = augment.cutmix > 0
    if augment.mixup > 0 and augment.cutmix > 0:
        is_cutmix = generator.rand() < 0.5
    alpha = augment.cutmix if is_cutmix else augment.mixup
    weight = float(generator.beta(alpha, alpha))
    if weight < 1 and is_cutmix:
        weight = _replace_box(images, weight, generator)
    elif weight < 1:
        others = images.flip(0).mul_(1 - weight)
        images.mul_(weight).add_(others)
    targets = F.one_hot(labels, classes).to(torch.get_default_dtype())
    return images, targets * weight + targets.flip(0) * (1 - weight)


def _replace_box(images: Tensor, weight: float, generator: np.random.RandomState) -> float:
    """Replace a box of every image by that of its partner; return the share that stays."""
    top, bottom, left, right = draw_box(images.shape, weight, generator)
    images[..., top:bottom, left:right] = images.flip(0)[..., top:bottom, left:right]
    height, width = images.shape[-2:]
    return 1 - (bottom - top) * (right - left) / (height * width)


def draw_box(
    shape: torch.Size | tuple[int, ...], weight: float, generator: np.random.RandomState
) -> tuple[int, int, int, int]:
    """Draw CutMix's box (top, bottom, left, right) of a share 1 - `weight` of the image's area.

    The box is that of timm 0.3.2; later versions cover a pixel more of an odd side.
    """
    height, width = shape[-2:]
    top, bottom = _draw_edges(height, weight, generator)
    left, right = _draw_edges(width, weight, generator)
    return top, bottom, left, right


def _draw_edges(side: int, weight: float, generator: np.random.RandomState) -> tuple[int, int]:
    half = int(side * math.sqrt(1 - weight)) // 2
    centre = int(generator.randint(side))
    return max(0, centre - half), min(side, centre + half)
