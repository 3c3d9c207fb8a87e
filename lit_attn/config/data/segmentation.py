"""Data for semantic segmentation: ADE20K, and scenes that need no download.

The order of `augment` is the order of mmsegmentation's pipeline.
"""

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from lit_attn.config.augment import (
    CategoryCrop,
    Photometric,
    Rescale,
    SceneAugmentation,
    SceneFlip,
)
from lit_attn.config.data.base import Data, method
from lit_attn.config.signatures import ImageMasks
from lit_attn.schema.base import load, outside_identity
from lit_attn.schema.errors import ConfigError

# Label of the pixels that have no class.
IGNORED = 255

# Classes of `kind: scenes`: three grounds and ten digits.
SCENE_CLASSES = ("stripes", "checks", "speckle", *(f"digit {number}" for number in range(10)))


class Scenery(Data):
    """Images with a label for every pixel, in ADE20K's layout below `root`.

    `images/training/*.jpg` train and `images/validation/*.jpg` evaluate (split "test"); each image
    has labels in `annotations/*/*.png`, where 0 is no class. Images are resized to a short side of
    `short_side` pixels and a long side of at most `long_side`. Training takes windows of `crop`
    pixels along each side.
    """

    root: Path = Field(description="folder of the images and annotations")
    crop: PositiveInt = Field(description="side of a training window in pixels")
    short_side: PositiveInt = Field(description="short side of a resized image in pixels")
    long_side: PositiveInt = Field(description="most pixels of the long side of a resized image")
    batch_size: PositiveInt = Field(8, description="windows of a training step, over all devices")
    eval_batch_size: Literal[1] = Field(1, description="1, because images differ in size")
    drop_last: bool = Field(False, description="leave out an epoch's last batch if it is not full")
    validation: int = Field(0, ge=0, description="images held out of training, by a fixed split")
    augment: tuple[SceneAugmentation, ...] = Field(
        (Rescale(), CategoryCrop(), SceneFlip(), Photometric()),
        description="augmentation steps in the order of their application",
    )
    workers: int = outside_identity(4, "processes that read images; 0: the training process")

    @field_validator("augment")
    @classmethod
    def _check_window(cls, steps: tuple[SceneAugmentation, ...]) -> tuple[SceneAugmentation, ...]:
        if not any(step.makes_window for step in steps):
            raise ValueError("needs 'category-crop': all windows of a batch have one size")
        return steps

    def signature(self) -> ImageMasks:
        return ImageMasks((3, self.crop, self.crop), self.num_classes, IGNORED, self.class_names)

    build: ClassVar = method("lit_attn.data.segmentation:SceneryData")

    @property
    def splits(self) -> tuple[str, ...]:
        return ("test", "val") if self.validation else ("test",)

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of classes."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; empty if they are ADE20K's, which mmsegmentation knows."""
        return ()

    @property
    def palette(self) -> tuple[tuple[int, int, int], ...]:
        """Colours (red, green, blue; 0 to 255) of the classes that `class_names` lists."""
        return ()

    def prepare(self) -> Path:
        """Return the folder of the images, which are written there first if they are generated."""
        return self.root


class Ade20k(Scenery):
    """ADE20K's 150 classes (Zhou et al. 2017); `root` is the folder ADEChallengeData2016."""

    kind: Literal["ade20k"] = "ade20k"
    num_classes: ClassVar = 150
    root: Path = outside_identity(Path("data/ADEChallengeData2016"), "folder of the images")
    crop: PositiveInt = Field(512, description="side of a training window in pixels")
    short_side: PositiveInt = Field(512, description="short side of a resized image in pixels")
    long_side: PositiveInt = Field(
        2048, description="most pixels of the long side of a resized image"
    )

    def check_files(self) -> None:
        require_scenery(self.root)


class Scenes(Scenery):
    """scikit-learn's handwritten digits on textured ground: ten digits and three grounds.

    The images are written on first use to a folder below `root` and are equal for all seeds.
    Training images have 32 x 32 pixels; evaluation images are half as wide again, so that a window
    of 32 pixels slides. By default no image is flipped, because a mirrored digit is another one or
    none, and no image is rescaled or recoloured, because a small model would need longer.
    """

    kind: Literal["scenes"] = "scenes"
    num_classes: ClassVar = len(SCENE_CLASSES)
    class_names: ClassVar = SCENE_CLASSES
    root: Path = outside_identity(Path("data/scenes"), "folder to which the images are written")
    training_images: PositiveInt = Field(2000, description="number of training images")
    evaluation_images: PositiveInt = Field(200, description="number of evaluation images")
    augment: tuple[SceneAugmentation, ...] = Field(
        (CategoryCrop(),), description="augmentation steps in the order of their application"
    )
    crop: PositiveInt = Field(32, description="side of a training window in pixels")
    short_side: PositiveInt = Field(32, description="short side of a resized image in pixels")
    long_side: PositiveInt = Field(
        128, description="most pixels of the long side of a resized image"
    )
    workers: int = outside_identity(0, "processes that read images; 0: the training process")

    @model_validator(mode="after")
    def _has_a_batch(self) -> Self:
        samples = self.training_images - self.validation
        if samples < 1:
            raise ValueError(
                f"validation: {self.validation} of {self.training_images} images leave none"
            )
        if self.drop_last:
            self.require_a_batch(samples)
        return self

    @property
    def palette(self) -> tuple[tuple[int, int, int], ...]:
        palette: tuple[tuple[int, int, int], ...] = load("lit_attn.data.scenes:PALETTE")
        return palette

    prepare: ClassVar = method("lit_attn.data.scenes:prepare")


def require_scenery(root: Path) -> None:
    """Raise ConfigError if `root` does not have the layout of ADE20K's own folder."""
    for kind in ("images", "annotations"):
        for split in ("training", "validation"):
            if not (folder := root / kind / split).is_dir():
                inside = root / "ADEChallengeData2016"
                hint = f"; did you mean {inside}?" if inside.is_dir() else ""
                raise ConfigError(
                    f"data.root: {folder} is not a folder; root is ADE20K's ADEChallengeData2016 "
                    f"(`kind: scenes` needs no download){hint}"
                )
