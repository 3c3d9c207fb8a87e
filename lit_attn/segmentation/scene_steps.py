"""Augmentation steps of images with a label for every pixel: transforms of mmsegmentation.

A list of steps is applied in the order in which it is written.
"""

from abc import abstractmethod
from typing import Any, ClassVar, Protocol

from pydantic import Field, PositiveFloat

from lit_attn.schema.base import Kind


class SceneSizes(Protocol):
    """Sizes in pixels of the images of a data set."""

    @property
    def crop(self) -> int:
        """Side of a training window."""

    @property
    def short_side(self) -> int:
        """Short side of a resized image."""

    @property
    def long_side(self) -> int:
        """Most pixels of a resized image's long side."""


class SceneAugmentation(Kind):
    """Base of the augmentation steps, transforms of images with a label for every pixel."""

    makes_window: ClassVar[bool] = False
    """True if the step cuts a window of `data.crop` pixels, so that images make a batch."""

    @abstractmethod
    def transform(self, data: SceneSizes) -> dict[str, Any]:
        """Return mmsegmentation's configuration of the transform."""


class Rescale(SceneAugmentation, kind="rescale"):
    """Resizing by a random factor, relative to the size of evaluation."""

    ratio: tuple[PositiveFloat, PositiveFloat] = Field((0.5, 2.0), description="range of factors")

    def transform(self, data: SceneSizes) -> dict[str, Any]:
        return {
            "type": "RandomResize",
            "ratio_range": self.ratio,
            "resize_type": "mmseg.Resize",
            "scale": (data.long_side, data.short_side),
            "keep_ratio": True,
        }


class CategoryCrop(SceneAugmentation, kind="category-crop"):
    """A random window in which no class covers more than `most` of the labelled pixels."""

    makes_window = True
    most: float = Field(0.75, gt=0, le=1, description="greatest share of one class in the window")

    def transform(self, data: SceneSizes) -> dict[str, Any]:
        size = (data.crop, data.crop)
        return {"type": "mmseg.RandomCrop", "crop_size": size, "cat_max_ratio": self.most}


class SceneFlip(SceneAugmentation, kind="flip"):
    """Mirroring left-right."""

    p: float = Field(0.5, ge=0, le=1, description="probability for each image")

    def transform(self, data: SceneSizes) -> dict[str, Any]:
        return {"type": "mmseg.RandomFlip", "prob": self.p}


class Photometric(SceneAugmentation, kind="photometric"):
    """Random brightness, contrast, saturation and hue (mmsegmentation's ranges)."""

    def transform(self, data: SceneSizes) -> dict[str, Any]:
        return {"type": "mmseg.PhotoMetricDistortion"}
