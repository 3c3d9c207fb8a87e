"""Data sets of images with one label each.

`Images` are held in memory and augmented on the device. `ImageFiles` are read from the disk for
each batch and augmented by timm.
"""

import zipfile
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from lit_attn.data.augment.base import Augmentation, NormalizeConfig
from lit_attn.data.base import Data, method, require_split_folders
from lit_attn.schema.base import Config, consistency_check, outside_identity
from lit_attn.schema.errors import ConfigError
from lit_attn.signatures import ImageLabels, ImageTargets

Count = Annotated[int, Field(ge=0)]
Range = tuple[PositiveFloat, PositiveFloat]
ChannelMeans = tuple[float, float, float]
ChannelDeviations = tuple[PositiveFloat, PositiveFloat, PositiveFloat]


class Images(Data):
    """Images with one label each, held in memory and augmented on the device."""

    training_images: ClassVar[int | None] = None
    """Number of training images before any are held out; None if only the files tell."""

    epoch_length: PositiveInt = Field(1, description="passes over the data in an epoch")
    drop_last: bool = Field(True, description="leave out an epoch's last batch if it is not full")
    validation: int = Field(0, ge=0, description="images held out of train, by a fixed split")
    augment: tuple[Augmentation, ...] = Field(
        (NormalizeConfig(),), description="augmentation steps in the order of their application"
    )

    @field_validator("augment")
    @classmethod
    def _check_order(cls, steps: tuple[Augmentation, ...]) -> tuple[Augmentation, ...]:
        """Refuse steps that stand before or after a step whose output they cannot work on."""
        stages = [step.stage for step in steps]
        if stages.count("normalize") != 1:
            raise ValueError(f"needs 'normalize' once, has it {stages.count('normalize')} times")
        normalization = stages.index("normalize")
        for position, (step, stage) in enumerate(zip(steps, stages, strict=True)):
            if stage == "bytes" and position > normalization:
                raise ValueError(f"'{step.kind}' works on bytes: put it before normalize")
            if stage in ("normalized", "batch") and position < normalization:
                raise ValueError(
                    f"'{step.kind}' works on normalised images: put it after normalize"
                )
            if stage == "batch" and position < len(steps) - 1:
                raise ValueError(f"'{step.kind}' works on the batch: put it last")
        return steps

    build: ClassVar = method("lit_attn.data.images:ImageData")

    @property
    def prepares_on_cpu(self) -> bool:
        """True if a step of the augmentation works on bytes, as Pillow does."""
        return any(step.stage == "bytes" for step in self.augment)

    @abstractmethod
    def read_splits(self) -> Any:
        """Return the `lit_attn.data.sets.Split` of "train", "test" and, if it exists, "val".

        Raises ConfigError naming the file or folder that is missing or malformed.
        """

    @property
    @abstractmethod
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 if images have numbers to predict."""
        return 0

    @property
    def num_outputs(self) -> int:
        """Numbers to predict for each image; 0 if images have classes."""
        return 0


class ClassImages(Images):
    """Images whose labels are classes."""

    def signature(self) -> ImageLabels:
        return ImageLabels(self.image_shape, self.num_classes)

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of classes."""


class Digits(ClassImages, kind="digits"):
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, in a fixed stratified split."""

    validation: Literal[0] = Field(0, description="0, because the data has a validation split")
    training_images: ClassVar = 1200
    image_shape: ClassVar = (1, 8, 8)
    num_classes: ClassVar = 10
    read_splits: ClassVar = method("lit_attn.data.sets:read_digits")


class Cifar(ClassImages):
    """torchvision's copy of CIFAR below `root`, downloaded if it is missing."""

    has_val_files = False
    root: Path = outside_identity(Path("data"), "folder of torchvision's files")
    training_images: ClassVar = 50_000
    image_shape: ClassVar = (3, 32, 32)
    read_splits: ClassVar = method("lit_attn.data.sets:read_cifar")


class Cifar10(Cifar, kind="cifar10"):
    """CIFAR-10: 50,000 training and 10,000 test images of 32 x 32 pixels in 10 classes."""

    num_classes: ClassVar = 10


class Cifar100(Cifar, kind="cifar100"):
    """CIFAR-100: 50,000 training and 10,000 test images of 32 x 32 pixels in 100 classes."""

    num_classes: ClassVar = 100


class OwnImages(Images):
    """Images from the user's files. Identities and tables contain `name` and not the path."""

    name: str = Field(description="name of the data set in identities and tables")
    size: PositiveInt = Field(description="side of an image in pixels")
    channels: Literal[1, 3] = Field(3, description="channels of an image: 1 (grey) or 3 (RGB)")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (self.channels, self.size, self.size)


class OwnClasses(OwnImages, ClassImages):
    """Images of the user with classes."""

    classes: PositiveInt = Field(description="number of classes")

    @property
    def num_classes(self) -> int:
        return self.classes


class OwnTargets(OwnImages):
    """Images of the user with numbers to predict, for the task `regression`."""

    def signature(self) -> ImageTargets:
        return ImageTargets(self.image_shape, self.num_outputs)

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """Numbers to predict for each image."""

    @consistency_check
    def _has_no_classes_to_mix(self) -> None:
        """Refuse MixUp and CutMix."""
        if any(step.stage == "batch" for step in self.augment):
            raise ValueError("augment: 'mix' mixes classes, and these images have none")


class Npz(OwnClasses, kind="npz"):
    """One .npz with x_train, y_train, x_test, y_test (uint8, NHWC)."""

    path: Path = outside_identity(..., "file of the images")
    read_splits: ClassVar = method("lit_attn.data.sets:read_npz")

    def check_files(self) -> None:
        super().check_files()
        require_arrays(self.path)


class NpzTargets(OwnTargets, kind="npz-targets"):
    """One .npz with x_train and x_test (uint8, NHWC), y_train and y_test (numbers; N, outputs)."""

    path: Path = outside_identity(..., "file of the images")
    outputs: PositiveInt = Field(1, description="numbers to predict for each image")
    read_splits: ClassVar = method("lit_attn.data.sets:read_npz")

    @property
    def num_outputs(self) -> int:
        return self.outputs

    def check_files(self) -> None:
        super().check_files()
        require_arrays(self.path)


def require_arrays(path: Path) -> None:
    """Raise ConfigError unless an .npz file has images and labels of train and test.

    Only the directory of the file is read. `read_splits` reports a file of another format.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile):
        return
    for name in ("x_train", "y_train", "x_test", "y_test"):
        if name not in names:
            raise ConfigError(f"data.path: {path}: has no '{name}'; it has {', '.join(names)}")


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


class ImageFiles(Data):
    """Images on the disk: path/train/CLASS/* for training, path/val or path/test likewise.

    The class of an image is the first folder below its split, at whatever depth the file is. A
    single evaluated folder is the split "test". With both folders, val is the split "val" and
    test the split "test".

    Image sizes may be progressive: the first `epochs_per_size` epochs have images of `sizes[0]`
    pixels, and so on; all later epochs and every evaluation have `size`. With repeated augmentation
    (Hoffer et al. 2020) an epoch keeps its number of images, and each is used `repeats` times. The
    last partial batch of an epoch is dropped.
    """

    name: str = Field(description="name of the data set in identities and tables")
    classes: PositiveInt = Field(description="number of classes")
    path: Path = outside_identity(Path("data/imagenet"), "folder of train, and of val or test")
    size: PositiveInt = Field(224, description="side of an image in pixels")
    sizes: tuple[PositiveInt, ...] = Field(
        (), description="sides in pixels of the images of the first epochs (progressive sizes)"
    )
    epochs_per_size: PositiveInt = Field(1, description="epochs that each of `sizes` lasts")
    repeats: PositiveInt = Field(
        1, description="times that an epoch repeats each image (repeated augmentation)"
    )
    validation: Count = Field(0, description="images held out of train, by a fixed split")
    mean: ChannelMeans = Field(
        (0.485, 0.456, 0.406), description="mean of each channel for the normalisation, from 0 to 1"
    )
    std: ChannelDeviations = Field(
        (0.229, 0.224, 0.225),
        description="standard deviation of each channel for the normalisation, from 0 to 1",
    )
    interpolation: Literal["bilinear", "bicubic"] = Field(
        "bicubic", description="method of resizing"
    )
    crop_share: float = Field(
        0.875, gt=0, le=1, description="evaluation crop: `size` over the resized image's short side"
    )
    augment: TimmAugmentation = Field(
        TimmAugmentation(), description="timm's augmentation of training images"
    )

    unreadable: Count = outside_identity(
        0,
        "images of each split that may be left out because they cannot be read; 0: the first one "
        "ends the cell",
    )
    prepares_on_cpu: ClassVar = True

    def signature(self) -> ImageLabels:
        return ImageLabels((3, self.size, self.size), self.classes, self.sizes)

    def check_files(self) -> None:
        super().check_files()
        require_split_folders("data.path", self.path)

    build: ClassVar = method("lit_attn.data.image_files:ImageFileData")

    @abstractmethod
    def list_files(self) -> Any:
        """Return the `lit_attn.data.image_lists.Files` of "train", "test" and perhaps "val"."""

    def at_final_size(self) -> Self:
        return self.model_copy(update={"sizes": ()})

    @consistency_check
    def _mixes_pairs(self) -> None:
        """Refuse MixUp and CutMix of an odd number of images."""
        if self.augment.is_mixed and self.batch_size % 2:
            raise ValueError(f"batch_size: {self.batch_size} images cannot be mixed in pairs")

    def size_in(self, epoch: int) -> int:
        """Return the side length, in pixels, of the images of training epoch 0, 1, ..."""
        stage = epoch // self.epochs_per_size
        if stage < len(self.sizes):
            return self.sizes[stage]
        return self.size


class ClassFolders(ImageFiles):
    """Images in class folders."""

    list_files: ClassVar = method("lit_attn.data.image_lists:list_folders")


class ImageFolder(ClassFolders, kind="image-folder"):
    """Class folders of the user. Identities and tables contain `name` and not the path."""


class ImageNet(ClassFolders, kind="imagenet"):
    """ILSVRC 2012: 1,281,167 images to train, 50,000 to evaluate (its validation set)."""

    has_val_files = False
    name: str = Field("imagenet", description="name of the data set in identities and tables")
    classes: PositiveInt = Field(1000, description="number of classes")


class WebDataset(ImageFiles, kind="webdataset"):
    """Images in tar files: path/train/*.tar, and path/val/*.tar or path/test/*.tar.

    A sample is an image, as KEY.jpg or KEY.png, and KEY.cls, which has the number of the class. The
    files are read at random places, so every batch is the same on any number of processes.
    """

    list_files: ClassVar = method("lit_attn.data.image_lists:list_shards")
