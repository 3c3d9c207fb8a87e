"""Data sets, and what happens to a training batch of images, in the order it happens."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from lit_attn.config.augment import Augmentation, NormalizeConfig, check_order
from lit_attn.config.data.base import Data
from lit_attn.schema.base import outside_identity


class Images(Data):
    """Images with one label each."""

    epoch_length: PositiveInt = Field(1, description="passes over the data that one epoch counts")
    drop_last: bool = True
    validation: int = Field(0, ge=0, description="images held out of train, by a fixed split")
    augment: tuple[Augmentation, ...] = (NormalizeConfig(),)

    @field_validator("augment")
    @classmethod
    def _check_order(cls, steps: tuple[Augmentation, ...]) -> tuple[Augmentation, ...]:
        check_order(steps)
        return steps

    @property
    def training_images(self) -> int | None:
        """How many there are before any are held out; None where only the files can tell."""
        return None

    @model_validator(mode="after")
    def _a_batch_at_least(self) -> Self:
        if self.training_images is not None:
            samples = self.training_images - self.validation
            if samples < 1:
                raise ValueError(
                    f"validation: {self.validation} of {self.training_images} images leave none"
                )
            if self.drop_last:
                self.require_a_batch(self.epoch_length * samples)
        return self

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        raise NotImplementedError

    @property
    def num_classes(self) -> int:
        raise NotImplementedError


class Digits(Images):
    """Scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; fixed stratified split."""

    kind: Literal["digits"] = "digits"
    validation: Literal[0] = Field(0, description="it has a validation split of its own")

    @property
    def training_images(self) -> int:
        return 1200

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (1, 8, 8)

    @property
    def num_classes(self) -> int:
        return 10


class Cifar(Images):
    """Torchvision's copy of CIFAR under `root`, downloaded where absent."""

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


class Cifar10(Cifar):
    kind: Literal["cifar10"] = "cifar10"


class Cifar100(Cifar):
    kind: Literal["cifar100"] = "cifar100"


class Given(Images):
    """Images of the user's: `name` stands for them in identities and tables, `path` finds them."""

    kind: Literal["folder", "npz"]
    name: str
    path: Path = outside_identity(..., "where the images are")
    size: PositiveInt
    channels: Literal[1, 3] = 3
    classes: PositiveInt

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (self.channels, self.size, self.size)

    @property
    def num_classes(self) -> int:
        return self.classes


class Folder(Given):
    """Class folders: path/train/CLASS/*.png and path/test/CLASS/*.png, resized to `size`."""

    kind: Literal["folder"] = "folder"


class Npz(Given):
    """One .npz with x_train, y_train, x_test, y_test (uint8, NHWC)."""

    kind: Literal["npz"] = "npz"
