"""Augmentation steps for images with one label each: their configurations, and how they are built.

A list of steps is applied in the order in which it is written.
"""

from abc import abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, PositiveInt

from lit_attn.data.base import method
from lit_attn.schema.base import Kind

Stage = Literal["any", "bytes", "normalize", "normalized", "batch"]
Statistics = tuple[float, ...] | None


class ImageFormat(NamedTuple):
    """Training images that a step is built for."""

    shape: tuple[int, int, int]
    """(channels, height, width)"""
    classes: int
    mean: list[float]
    """Mean of each channel, 0 to 1."""
    std: list[float]
    """Standard deviation of each channel, 0 to 1."""


class Augmentation(Kind):
    """Base of the augmentation steps for images with one label each."""

    stage: ClassVar[Stage]
    """Input of the step: `bytes` (uint8), `normalize` (bytes in, float out), `normalized` (float),
    `any` of both, or `batch` (the normalised images and the labels of a batch)."""

    @abstractmethod
    def build(self, images: ImageFormat) -> Any:
        """Return the step, an instance of `lit_attn.data.augment.steps.Step` or `BatchStep`."""

    def with_statistics(self, images: ImageFormat) -> ImageFormat:
        """Return `images` with the mean and deviation by which this step normalises."""
        return images


class FlipConfig(Augmentation, kind="flip"):
    """Mirroring left-right."""

    stage = "any"
    p: float = Field(0.5, ge=0, le=1, description="probability for each image")
    build: ClassVar = method("lit_attn.data.augment.steps:Flip")


class CropConfig(Augmentation, kind="crop"):
    """Padding of every side by zeros, and a random crop of the original size."""

    stage = "any"
    padding: PositiveInt = Field(4, description="zero pixels added to every side")
    build: ClassVar = method("lit_attn.data.augment.steps:Crop")


class AutoAugmentConfig(Augmentation, kind="autoaugment"):
    """AutoAugment with its CIFAR-10 policy of 25 sub-policies (Cubuk et al. 2019).

    In this variant (docs/setups.md, CIFAR-100) shears are bicubic and rotations turn one way only.
    """

    stage = "bytes"
    fill: int = Field(128, ge=0, le=255, description="grey level outside the image")
    build: ClassVar = method("lit_attn.data.augment.policies:AutoAugment")


class RandAugmentConfig(Augmentation, kind="randaugment"):
    """RandAugment (Cubuk et al. 2020): `ops` operations, drawn with replacement.

    The operations and their ranges are those of torchvision.
    """

    stage = "bytes"
    ops: PositiveInt = Field(2, description="operations for each image")
    magnitude: int = Field(14, ge=0, le=30, description="strength of the operations")
    build: ClassVar = method("lit_attn.data.augment.policies:RandAugment")


class NormalizeConfig(Augmentation, kind="normalize"):
    """Conversion of bytes to float, minus the mean, over the standard deviation, per channel."""

    stage = "normalize"
    mean: Statistics = Field(
        None, description="mean of each channel, 0 to 1; null: that of the training images"
    )
    std: Statistics = Field(
        None, description="deviation of each channel, 0 to 1; null: that of the training images"
    )
    build: ClassVar = method("lit_attn.data.augment.steps:Normalize")

    def with_statistics(self, images: ImageFormat) -> ImageFormat:
        """Return `images` with the mean and the deviation of this configuration."""
        mean = self.mean or images.mean
        std = self.std or images.std
        return images._replace(mean=list(mean), std=list(std))


class ErasingConfig(Augmentation, kind="erasing"):
    """Random erasing (Zhong et al. 2020): a rectangle is set to the raw mean of the data set."""

    stage = "normalized"
    p: float = Field(0.25, ge=0, le=1, description="probability for each image")
    area: tuple[float, float] = Field((0.02, 0.4), description="range of the erased share")
    aspect: tuple[float, float] = Field((0.3, 3.33), description="range of height over width")
    build: ClassVar = method("lit_attn.data.augment.steps:Erasing")


class MixConfig(Augmentation, kind="mix"):
    """MixUp or CutMix, with one lambda for the batch."""

    stage = "batch"
    mixup: float = Field(1.0, ge=0, description="alpha of MixUp's Beta(alpha, alpha); 0: none")
    cutmix: float = Field(1.0, ge=0, description="alpha of CutMix's Beta(alpha, alpha); 0: none")
    p: float = Field(0.5, ge=0, le=1, description="probability for each batch")
    switch: float = Field(0.5, ge=0, le=1, description="share of CutMix if both are on")
    build: ClassVar = method("lit_attn.data.augment.steps:Mix")
