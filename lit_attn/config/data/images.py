"""Data sets of images that fit into memory, each image with one label."""

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from lit_attn.config.augment import Augmentation, NormalizeConfig, check_order
from lit_attn.config.data.base import Data
from lit_attn.config.signatures import ImageLabels
from lit_attn.schema.base import load, outside_identity
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    import torch


class Images(Data):
    """Images with one label each, held in memory and augmented on the device."""

    epoch_length: PositiveInt = Field(1, description="passes over the data in an epoch")
    drop_last: bool = Field(True, description="leave out an epoch's last batch if it is not full")
    validation: int = Field(0, ge=0, description="images held out of train, by a fixed split")
    augment: tuple[Augmentation, ...] = Field(
        (NormalizeConfig(),), description="augmentation steps in the order of their application"
    )

    @field_validator("augment")
    @classmethod
    def _check_order(cls, steps: tuple[Augmentation, ...]) -> tuple[Augmentation, ...]:
        check_order(steps)
        return steps

    @property
    def training_images(self) -> int | None:
        """Number of training images before any are held out; None if only the files tell."""
        return None

    @model_validator(mode="after")
    def _has_a_batch(self) -> Self:
        if self.training_images is not None:
            samples = self.training_images - self.validation
            if samples < 1:
                raise ValueError(
                    f"validation: {self.validation} of {self.training_images} images leave none"
                )
            if self.drop_last:
                self.require_a_batch(self.epoch_length * samples)
        return self

    def signature(self) -> ImageLabels:
        return ImageLabels(self.image_shape, self.num_classes)

    def build(self, seed: int, device: "torch.device") -> Any:
        return load("lit_attn.data.images:ImageData")(self, seed, device)

    @abstractmethod
    def read_splits(self) -> Any:
        """Return the `lit_attn.data.sets.Split` of "train", "test" and, if it exists, "val".

        Raises ConfigError naming the file or folder that is missing or malformed.
        """

    @property
    def splits(self) -> tuple[str, ...]:
        return ("test", "val") if self.validation else ("test",)

    @property
    @abstractmethod
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of classes."""


class Digits(Images):
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, in a fixed stratified split."""

    kind: Literal["digits"] = "digits"
    validation: Literal[0] = Field(0, description="0, because the data has a validation split")

    @property
    def splits(self) -> tuple[str, ...]:
        return ("test", "val")

    @property
    def training_images(self) -> int:
        return 1200

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (1, 8, 8)

    @property
    def num_classes(self) -> int:
        return 10

    def read_splits(self) -> Any:
        return load("lit_attn.data.sets:read_digits")()


class Cifar(Images):
    """torchvision's copy of CIFAR below `root`, downloaded if it is missing."""

    kind: Literal["cifar10", "cifar100"]
    root: Path = outside_identity(Path("data"), "folder of torchvision's files")

    @property
    def training_images(self) -> int:
        return 50_000

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (3, 32, 32)

    @property
    def num_classes(self) -> int:
        return int(self.kind.removeprefix("cifar"))

    def read_splits(self) -> Any:
        return load("lit_attn.data.sets:read_cifar")(self)


class Cifar10(Cifar):
    """CIFAR-10: 50,000 training and 10,000 test images of 32 x 32 pixels in 10 classes."""

    kind: Literal["cifar10"] = "cifar10"


class Cifar100(Cifar):
    """CIFAR-100: 50,000 training and 10,000 test images of 32 x 32 pixels in 100 classes."""

    kind: Literal["cifar100"] = "cifar100"


class OwnImages(Images):
    """Images from the user's files. Identities and tables contain `name` and not the path."""

    kind: Literal["folder", "npz"]
    name: str = Field(description="name of the data set in identities and tables")
    path: Path = outside_identity(..., "file or folder of the images")
    size: PositiveInt = Field(description="side of an image in pixels")
    channels: Literal[1, 3] = Field(3, description="channels of an image: 1 (grey) or 3 (RGB)")
    classes: PositiveInt = Field(description="number of classes")

    @abstractmethod
    def count_training_images(self) -> int:
        """Check headers, labels and names of the files; return the number of training images.

        Raises the ConfigErrors of `read_splits` that can be found without reading the images.
        """

    def check_files(self) -> None:
        try:
            load("lit_attn.data.sets:check_epoch")(self, self.count_training_images())
        except ConfigError as error:
            if str(error).startswith("data."):
                raise
            raise ConfigError(f"data.path: {error}") from error

    @property
    def splits(self) -> tuple[str, ...]:
        return ("test", "val")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (self.channels, self.size, self.size)

    @property
    def num_classes(self) -> int:
        return self.classes


class Folder(OwnImages):
    """Class folders of images, resized to `size`: path/train/CLASS/* and path/test/CLASS/*.

    The evaluated folder may also be called val. With both, val is the split "val".
    """

    kind: Literal["folder"] = "folder"

    def read_splits(self) -> Any:
        return load("lit_attn.data.sets:read_folder")(self)

    def count_training_images(self) -> int:
        return len(load("lit_attn.data.sets:list_images")(self)["train"])


class Npz(OwnImages):
    """One .npz with x_train, y_train, x_test, y_test (uint8, NHWC)."""

    kind: Literal["npz"] = "npz"

    def read_splits(self) -> Any:
        return load("lit_attn.data.sets:read_npz")(self)

    def count_training_images(self) -> int:
        splits = load("lit_attn.data.sets:read_npz")(self, headers=True)
        for name, split in splits.items():
            load("lit_attn.data.sets:check_split")(name, split, self)
        return len(splits["train"].labels)
