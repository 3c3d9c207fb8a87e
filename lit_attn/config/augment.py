"""Augmentation steps of images, applied in the order in which they are written."""

from typing import Literal

from pydantic import Field, PositiveInt

from lit_attn.schema.base import Kind


class Augmentation(Kind):
    """One step of augmentation; a list of them is applied in the order written."""


class Flip(Augmentation):
    """Mirror left-right with probability `p`."""

    kind: Literal["flip"] = "flip"
    p: float = Field(0.5, ge=0, le=1)


class Crop(Augmentation):
    """Pad every side by `padding` zero pixels and cut out the original size at random."""

    kind: Literal["crop"] = "crop"
    padding: PositiveInt = 4


class AutoAugment(Augmentation):
    """AutoAugment with its CIFAR-10 policy of 25 sub-policies (Cubuk et al. 2019).

    As the CIFAR-100 set-up has it: shears are bicubic, rotations turn one way (docs/setups.md).
    """

    kind: Literal["autoaugment"] = "autoaugment"
    fill: int = Field(128, ge=0, le=255)


class RandAugment(Augmentation):
    """`ops` operations drawn with replacement at magnitude `magnitude` of 30.

    `flavour: blanking` is the one of the ViT-small CIFAR set-up: its translations move by more than
    the image is wide, so with two draws 23.4 % of the images are black (docs/setups.md).
    `flavour: torchvision` is torchvision's.
    """

    kind: Literal["randaugment"] = "randaugment"
    ops: PositiveInt = 2
    magnitude: int = Field(14, ge=0, le=30)
    flavour: Literal["blanking", "torchvision"] = "torchvision"


class Normalize(Augmentation):
    """To float, minus the data set's mean, over its standard deviation (both per channel, 0..1)."""

    kind: Literal["normalize"] = "normalize"
    mean: tuple[float, ...] | None = Field(None, description="the data set's own where null")
    std: tuple[float, ...] | None = None


class Erasing(Augmentation):
    """Random erasing of a normalised image: a rectangle is set to the raw dataset mean."""

    kind: Literal["erasing"] = "erasing"
    p: float = Field(0.25, ge=0, le=1)
    area: tuple[float, float] = (0.02, 0.4)
    aspect: tuple[float, float] = (0.3, 3.33)


class Mix(Augmentation):
    """MixUp or CutMix, one lambda for the batch, with probability `p` for the batch."""

    kind: Literal["mix"] = "mix"
    mixup: float = Field(1.0, ge=0, description="alpha of Beta(alpha, alpha); 0 switches it off")
    cutmix: float = Field(1.0, ge=0)
    p: float = Field(0.5, ge=0, le=1)
    switch: float = Field(0.5, ge=0, le=1, description="share of CutMix where both are on")
