"""ImageNet, and any other data set of class folders, read from the disk through timm."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from lit_attn.config.data.base import Data
from lit_attn.config.signatures import ImageLabels
from lit_attn.schema.base import Config, load, outside_identity
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    import torch

Range = tuple[PositiveFloat, PositiveFloat]
Range3 = tuple[PositiveFloat, PositiveFloat, PositiveFloat]


class TimmAugmentation(Config):
    """timm's augmentation of a training image; timm applies the fields in their order."""

    crop: Literal["resized", "centre"] = Field(
        "resized", description="resized: a random crop; centre: the middle of the resized image"
    )
    area: Range = Field(
        (0.08, 1.0), description="least and greatest share of the image in a resized crop"
    )
    aspect: Range = Field(
        (3 / 4, 4 / 3), description="least and greatest aspect ratio of a resized crop"
    )
    flip: float = Field(0.5, ge=0, le=1, description="probability of mirroring left-right")
    policy: str | None = Field(
        None,
        pattern=r"^(rand|augmix|original|originalr|v0|v0r|3a)(-[a-z]+[0-9.]*)*$",
        description="timm's name of the policy, as rand-m9-mstd0.5-inc1; null: none",
    )
    jitter: float = Field(
        0.0, ge=0, description="strength of random brightness, contrast and saturation"
    )
    erasing: float = Field(0.0, ge=0, le=1, description="probability of random erasing with noise")
    mixup: float = Field(
        0.0, ge=0, description="alpha of MixUp's Beta(alpha, alpha); 0 switches it off"
    )
    cutmix: float = Field(
        0.0, ge=0, description="alpha of CutMix's Beta(alpha, alpha); 0 switches it off"
    )
    mix: float = Field(1.0, ge=0, le=1, description="share of batches that are mixed")
    switch: float = Field(0.5, ge=0, le=1, description="share of CutMix if both are on")

    @model_validator(mode="after")
    def _agrees_with_timm(self) -> "TimmAugmentation":
        if self.policy and not self.policy.startswith("3a") and self.jitter:
            raise ValueError("jitter: timm leaves it out with any policy but 3a; drop one of them")
        for name in ("area", "aspect"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name}: the range from {low} to {high} is empty")
        return self

    @property
    def mixes(self) -> bool:
        """True if MixUp or CutMix makes targets probabilities."""
        return self.mix > 0 and (self.mixup > 0 or self.cutmix > 0)


class ClassFolders(Data):
    """Images in folders by class: path/train/CLASS/* for training, path/val or path/test likewise.

    A single evaluated folder is the split "test". With both folders, val is the split "val" and
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
    validation: NonNegativeInt = Field(0, description="images held out of train, by a fixed split")
    mean: tuple[float, float, float] = Field(
        (0.485, 0.456, 0.406), description="mean of each channel for the normalisation, from 0 to 1"
    )
    std: Range3 = Field(
        (0.229, 0.224, 0.225),
        description="standard deviation of each channel for the normalisation, from 0 to 1",
    )
    interpolation: Literal["bilinear", "bicubic"] = Field(
        "bicubic", description="method of resizing"
    )
    crop_share: float = Field(
        0.875,
        gt=0,
        le=1,
        description="evaluation crop: `size` over the short side of the resized image",
    )
    augment: TimmAugmentation = Field(
        TimmAugmentation(), description="timm's augmentation of training images"
    )
    unreadable: NonNegativeInt = outside_identity(
        10, "images that cannot be read and are skipped before the cell fails"
    )
    workers: NonNegativeInt = outside_identity(
        8, "processes that read images; 0: the training process"
    )

    def signature(self) -> ImageLabels:
        return ImageLabels((3, self.size, self.size), self.classes, self.sizes)

    def build(self, seed: int, device: "torch.device") -> Any:
        return load("lit_attn.data.image_folder:ImageFolderData")(self, seed, device)

    def check_files(self) -> None:
        load("lit_attn.data.sets:find_split_folders")(self.path)
        train = self.path / "train"
        classes = sum(folder.is_dir() and any(folder.iterdir()) for folder in train.iterdir())
        if classes != self.classes:
            raise ConfigError(
                f"data.classes: {self.classes}, but {train} has {classes} folders that hold files"
            )

    @property
    def splits(self) -> tuple[str, ...]:
        return ("test", "val") if self.validation else ("test",)

    def at_final_size(self) -> Self:
        return self.model_copy(update={"sizes": ()})

    @model_validator(mode="after")
    def _mixes_pairs(self) -> Self:
        if self.augment.mixes and self.batch_size % 2:
            raise ValueError(f"batch_size: {self.batch_size} images cannot be mixed in pairs")
        return self

    def size_in(self, epoch: int) -> int:
        """Return the side length, in pixels, of the images of training epoch 0, 1, ..."""
        stage = epoch // self.epochs_per_size
        return self.sizes[stage] if stage < len(self.sizes) else self.size


class ImageFolder(ClassFolders):
    """Class folders of the user. Identities and tables contain `name` and not the path."""

    kind: Literal["image-folder"] = "image-folder"

    @property
    def splits(self) -> tuple[str, ...]:
        return ("test", "val")


class ImageNet(ClassFolders):
    """ILSVRC 2012: 1,281,167 images to train, 50,000 to evaluate (its validation set)."""

    kind: Literal["imagenet"] = "imagenet"
    name: str = Field("imagenet", description="name of the data set in identities and tables")
    classes: PositiveInt = Field(1000, description="number of classes")
