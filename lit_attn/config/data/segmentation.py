"""Semantic segmentation: the Segmenter, ADE20K, and scenes that need no download.

The order of `augment` is the order of mmsegmentation's pipeline.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from lit_attn.config.augment import (
    CategoryCrop,
    Photometric,
    Rescale,
    SceneAugmentation,
    SceneFlip,
)
from lit_attn.config.data.base import Data
from lit_attn.schema.base import outside_identity

# The label of pixels that have none.
IGNORED = 255

# Of `kind: scenes`: three grounds and ten digits.
SCENE_CLASSES = ("stripes", "checks", "speckle", *(f"digit {number}" for number in range(10)))


class Scenery(Data):
    """Images with a label for every pixel, in ADE20K's layout below `root`.

    `images/training/*.jpg` train, `images/validation/*.jpg` evaluate (split "test"), each with its
    `annotations/*/*.png`, where 0 is no class. An image is resized so that its short side has
    `short_side` pixels, its long side at most `long_side`; training sees windows of `crop`.
    """

    root: Path
    crop: PositiveInt
    short_side: PositiveInt
    long_side: PositiveInt
    batch_size: PositiveInt = 8
    eval_batch_size: Literal[1] = Field(1, description="images differ in size")
    drop_last: bool = False
    validation: int = Field(0, ge=0, description="images held out of training, by a fixed split")
    augment: tuple[SceneAugmentation, ...] = (Rescale(), CategoryCrop(), SceneFlip(), Photometric())
    workers: int = outside_identity(4, "processes that read and augment; 0: the trainer's own")

    @field_validator("augment")
    @classmethod
    def _check_window(cls, steps: tuple[SceneAugmentation, ...]) -> tuple[SceneAugmentation, ...]:
        if not any(step.makes_window for step in steps):
            raise ValueError("needs 'category-crop': all windows of a batch have one size")
        return steps

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of a training window."""
        return (3, self.crop, self.crop)

    @property
    def num_classes(self) -> int:
        raise NotImplementedError


class Ade20k(Scenery):
    """ADE20K's 150 classes (Zhou et al. 2017); `root` is the folder ADEChallengeData2016."""

    kind: Literal["ade20k"] = "ade20k"
    root: Path = outside_identity(Path("data/ADEChallengeData2016"), "where the images are")
    crop: PositiveInt = 512
    short_side: PositiveInt = 512
    long_side: PositiveInt = 2048

    @property
    def num_classes(self) -> int:
        return 150


class Scenes(Scenery):
    """Scikit-learn's real handwritten digits on textured ground: ten digits and three grounds.

    Written on first use to a folder below `root`; the same images for every seed. Training images
    are 32 pixels square, evaluation images half as wide again, so that a window of 32 slides. By
    default nothing is flipped, since a mirrored digit is another or none, nor rescaled or
    recoloured: a small model does not learn to read through that in minutes.
    """

    kind: Literal["scenes"] = "scenes"
    root: Path = outside_identity(Path("data/scenes"), "where the images are written")
    training_images: PositiveInt = 2000
    evaluation_images: PositiveInt = 200
    augment: tuple[SceneAugmentation, ...] = (CategoryCrop(),)
    crop: PositiveInt = 32
    short_side: PositiveInt = 32
    long_side: PositiveInt = 128
    workers: int = outside_identity(0, "processes that read and augment; 0: the trainer's own")

    @model_validator(mode="after")
    def _a_batch_at_least(self) -> "Scenes":
        samples = self.training_images - self.validation
        if samples < 1:
            raise ValueError(
                f"validation: {self.validation} of {self.training_images} images leave none"
            )
        if self.drop_last:
            self.require_a_batch(samples)
        return self

    @property
    def num_classes(self) -> int:
        return len(SCENE_CLASSES)
