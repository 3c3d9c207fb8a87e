"""Data for semantic segmentation: ADE20K, images of the user, and scenes that need no download.

Their augmentation steps are transforms of mmsegmentation, applied in the order of `augment`.
"""

from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from lit_attn.data.base import Data, method, require_path
from lit_attn.schema.base import Kind, consistency_check, outside_identity
from lit_attn.signatures import ImageMasks

Byte = Annotated[int, Field(ge=0, le=255)]
Colour = tuple[Byte, Byte, Byte]
IGNORED = 255  # Label of the pixels that have no class.

# Classes of `kind: scenes`: three grounds and ten digits.
SCENE_CLASSES = ("stripes", "checks", "speckle", *(f"digit {number}" for number in range(10)))


class SceneAugmentation(Kind):
    """Base of the augmentation steps, transforms of images with a label for every pixel."""

    makes_window: ClassVar[bool] = False
    """True if the step cuts a window of `data.crop` pixels, so that images make a batch."""

    @abstractmethod
    def transform(self, data: "Scenery") -> dict[str, Any]:
        """Return mmsegmentation's configuration of the transform."""


class Rescale(SceneAugmentation, kind="rescale"):
    """Resizing by a random factor, relative to the size of evaluation."""

    ratio: tuple[PositiveFloat, PositiveFloat] = Field((0.5, 2.0), description="range of factors")

    def transform(self, data: "Scenery") -> dict[str, Any]:
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

    def transform(self, data: "Scenery") -> dict[str, Any]:
        size = (data.crop, data.crop)
        return {"type": "mmseg.RandomCrop", "crop_size": size, "cat_max_ratio": self.most}


class SceneFlip(SceneAugmentation, kind="flip"):
    """Mirroring left-right."""

    p: float = Field(0.5, ge=0, le=1, description="probability for each image")

    def transform(self, data: "Scenery") -> dict[str, Any]:
        return {"type": "mmseg.RandomFlip", "prob": self.p}


class Photometric(SceneAugmentation, kind="photometric"):
    """Random brightness, contrast, saturation and hue (mmsegmentation's ranges)."""

    def transform(self, data: "Scenery") -> dict[str, Any]:
        return {"type": "mmseg.PhotoMetricDistortion"}


class Scenery(Data):
    """Images with a label for every pixel, in ADE20K's layout below `root`.

    `images/training/*` train and `images/validation/*` evaluate (split "test"); each image has
    labels of the same name in `annotations/training` or `annotations/validation`. Images are
    resized to a short side of `short_side` pixels and a long side of at most `long_side`. Training
    takes windows of `crop` pixels along each side.
    """

    has_val_files = False
    first_label: ClassVar = 1
    """Number of the first class in a label file; the numbers below it mean no class."""
    prepares_on_cpu: ClassVar = True
    void_hint: ClassVar[str] = ""
    """End of the message about an unknown number: the key of further numbers without a class."""

    root: Path = Field(description="folder of the images and annotations")
    crop: PositiveInt = Field(512, description="side of a training window in pixels")
    short_side: PositiveInt = Field(512, description="short side of a resized image in pixels")
    long_side: PositiveInt = Field(2048, description="most pixels of a resized image's long side")
    batch_size: PositiveInt = Field(8, description="windows of a training step, over all devices")
    eval_batch_size: Literal[1] = Field(1, description="1, because images differ in size")
    drop_last: bool = Field(False, description="leave out an epoch's last batch if it is not full")
    validation: int = Field(0, ge=0, description="images held out of training, by a fixed split")
    augment: tuple[SceneAugmentation, ...] = Field(
        (Rescale(), CategoryCrop(), SceneFlip(), Photometric()),
        description="augmentation steps in the order of their application",
    )

    @field_validator("augment")
    @classmethod
    def _check_window(cls, steps: tuple[SceneAugmentation, ...]) -> tuple[SceneAugmentation, ...]:
        """Refuse steps that cut no windows of one size."""
        if not any(step.makes_window for step in steps):
            raise ValueError("needs 'category-crop': all windows of a batch have one size")
        return steps

    def signature(self) -> ImageMasks:
        return ImageMasks((3, self.crop, self.crop), self.num_classes, IGNORED, self.class_names)

    build: ClassVar = method("lit_attn.data.segmentation:SceneryData")

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of classes."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; empty if they are ADE20K's, which mmsegmentation knows."""
        return ()

    @property
    def label_colours(self) -> dict[Colour, int]:
        """Label of each colour in label files; empty if the files have numbers."""
        return {}

    @property
    def void_numbers(self) -> tuple[int, ...]:
        """Numbers in label files that mean no class, besides those below `first_label`."""
        return (IGNORED,)

    def prepare(self) -> Path:
        """Return the folder of the images, which are written there first if they are generated."""
        return self.root

    def check_files(self) -> None:
        super().check_files()
        for content in ("images", "annotations"):
            for split in ("training", "validation"):
                require_path("data.root", self.root / content / split)


class Ade20k(Scenery, kind="ade20k"):
    """ADE20K's 150 classes (Zhou et al. 2017); `root` is the folder ADEChallengeData2016."""

    num_classes: ClassVar = 150
    root: Path = outside_identity(Path("data/ADEChallengeData2016"), "folder of the images")


class MasksConfig(Scenery, kind="masks"):
    """Images of the user with classes of the user, in ADE20K's layout below `root`.

    A label file, best a PNG, has one number for each pixel (from 0 in the order of `classes`; 255
    and `void` are no class). With `colours` its pixels have these colours, directly or through its
    palette.
    """

    first_label: ClassVar = 0
    void_hint: ClassVar = " (data.void: a further number for no class)"
    name: str = Field(description="name of the data set in identities and tables")
    root: Path = outside_identity(..., "folder of the images and annotations")
    classes: tuple[str, ...] = Field(min_length=2, max_length=255, description="names of classes")
    colours: tuple[Colour, ...] = Field(
        (), description="colour (red, green, blue) of each class in label files; empty: numbers"
    )
    void: int | Colour | None = Field(
        None,
        description="number of the pixels without a class, besides 255; colour with `colours`",
    )

    @consistency_check
    def _class_names_differ(self) -> None:
        """Refuse repeated classes."""
        for name in self.classes:
            if self.classes.count(name) > 1:
                raise ValueError(f"classes: '{name}' stands there twice")

    @consistency_check
    def _each_class_has_a_colour(self) -> None:
        """Refuse colours that do not tell all classes and `void` apart."""
        if not self.colours:
            if isinstance(self.void, tuple):
                raise ValueError(
                    f"void: {list(self.void)} is a colour, and label files have numbers without "
                    "`colours`; write the number of the pixels without a class"
                )
            return
        if isinstance(self.void, int):
            raise ValueError(
                f"void: {self.void} is a number, and label files have `colours`; write the colour "
                "of the pixels without a class: [red, green, blue]"
            )
        different = {*self.colours} - {self.void}
        if len(self.colours) != self.num_classes or len(different) != self.num_classes:
            raise ValueError(
                f"colours: {len(self.colours)} for {len(self.classes)} classes; each class and "
                "`void` need a colour of their own"
            )

    @consistency_check
    def _void_is_no_class(self) -> None:
        """Refuse the number of a class as `void`."""
        if isinstance(self.void, int) and 0 <= self.void < self.num_classes:
            raise ValueError(
                f"void: {self.void} is the number of the class '{self.classes[self.void]}'; the "
                f"numbers 0 to {self.num_classes - 1} are those of `classes`"
            )

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.classes

    @property
    def label_colours(self) -> dict[Colour, int]:
        labels = {colour: number for number, colour in enumerate(self.colours)}
        if isinstance(self.void, tuple):
            labels[self.void] = IGNORED
        return labels

    @property
    def void_numbers(self) -> tuple[int, ...]:
        return (self.void, IGNORED) if isinstance(self.void, int) else (IGNORED,)


class Scenes(Scenery, kind="scenes"):
    """scikit-learn's handwritten digits on textured ground: ten digits and three grounds.

    The images are written on first use to a folder below `root` and are equal for all seeds.
    Training images have 32 x 32 pixels; evaluation images are half as wide again, so that a window
    of 32 pixels slides. By default no image is flipped, because a mirrored digit is another one or
    none, and no image is rescaled or recoloured, because a small model would need longer.
    """

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
    long_side: PositiveInt = Field(128, description="most pixels of a resized image's long side")

    prepare: ClassVar = method("lit_attn.data.scenes:prepare")

    def check_files(self) -> None:
        """Do nothing: the images are written on first use."""
