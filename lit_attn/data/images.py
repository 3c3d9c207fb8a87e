"""Images with one label each, held in memory and augmented on the device: their base.

With steps that work on bytes, as Pillow does, or with worker processes, the training images are in
the memory of the CPU, and the steps before the normalisation are applied there. The normalisation
and later steps are applied on the device in any case, so the bits do not depend on the workers.

Each of n processes trains on every n-th image of a batch. It augments these images and those that
CutMix or MixUp mixes them with.

Shapes: images (N, C, H, W), uint8 on the device and float to the network; labels (N,).
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, PositiveInt, field_validator
from torch import Tensor

from lit_attn.data.augment.base import Augmentation, Batch, ImageFormat
from lit_attn.data.augment.pipeline import Pipeline, Plan
from lit_attn.data.augment.steps import NormalizeConfig
from lit_attn.data.base import Data
from lit_attn.data.labels import (
    measure_largest_class,
    require_used_classes,
    warn_of_missing_labels,
)
from lit_attn.data.loading import start_copy
from lit_attn.data.module import DataModule, EvaluationLoader, torch_generator
from lit_attn.data.pictures import read_picture
from lit_attn.data.sets import Split, convert_targets, fingerprint, hold_out, require_classes
from lit_attn.floors.base import Floor
from lit_attn.floors.samples import CLASS_RULES, NUMBER_RULES, Samples, class_floors, number_floors
from lit_attn.schema.base import consistency_check
from lit_attn.schema.errors import ConfigError
from lit_attn.signatures import ImageLabels, ImageTargets


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

    def build(self, seed: int, device: torch.device) -> "ImageData":
        return ImageData(self, seed, device)

    @property
    def prepares_on_cpu(self) -> bool:
        """True if a step of the augmentation works on bytes, as Pillow does."""
        return any(step.stage == "bytes" for step in self.augment)

    @abstractmethod
    def read_splits(self) -> dict[str, Split]:
        """Return the `Split` of "train", "test" and, if it exists, "val".

        Raises ConfigError naming the file or folder that is missing or malformed.
        """

    @property
    def floor_rules(self) -> tuple[str, ...]:
        return CLASS_RULES if self.num_classes else NUMBER_RULES

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


class Prepared(NamedTuple):
    """Rows of a training batch before the normalisation, and what the later steps need."""

    images: Tensor
    labels: Tensor
    plan: Plan


class ImageData(DataModule):
    """Splits of one data set on one device."""

    def __init__(self, data: Images, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        splits = load_splits(data)
        self.data = data
        if data.num_classes:
            labels = {name: split.labels for name, split in splits.items()}
            self.largest_class = measure_largest_class(labels)
        self.splits: list[str] = [name for name in ("val", "test") if name in splits]
        self._fingerprint = fingerprint(splits)
        # Pillow works on bytes on the CPU; reading them back would wait for the GPU.
        is_on_host = data.prepares_on_cpu or self.workers > 0
        self.tensors: dict[str, tuple[Tensor, Tensor]] = {}
        for name, split in splits.items():
            place = torch.device("cpu") if name == "train" and is_on_host else device
            split_images = torch.from_numpy(np.ascontiguousarray(split.images)).to(place)
            split_labels = torch.from_numpy(np.ascontiguousarray(split.labels)).to(place)
            self.tensors[name] = (split_images, split_labels)
        images = splits["train"].images
        image_format = ImageFormat(data.image_shape, data.num_classes, *statistics(images))
        self.pipeline = Pipeline(data.augment, image_format, device)
        self.set_epoch(data.epoch_length * len(images), data.drop_last)

    def fingerprint(self) -> str:
        return self._fingerprint

    def batch(self, step: int) -> Prepared:
        """Return the rows of a step that this process needs, before the normalisation."""
        images, labels = self.tensors["train"]
        order = self.rows(step, self.draw_order)
        generator = torch_generator(self.seed, "batch", step)
        plan = self.pipeline.plan(len(order), generator, self.rank, self.world)
        rows = start_copy(order[plan.rows], images.device)
        prepared = self.pipeline.prepare(images[rows], plan)
        return Prepared(prepared, labels[rows], plan._replace(before=[]))

    def finish(self, batch: Prepared) -> list[Batch]:
        return [self.pipeline.finish(*batch)]

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        all_images, all_labels = self.tensors[split]
        count = len(all_images)
        images = self.share(all_images)
        labels = self.share(all_labels)
        places: Sequence[int] = self.share(range(count))
        if not places:
            # More processes than images: this process evaluates the first one as padding.
            images = all_images[:1]
            labels = all_labels[:1]
            places = [count]
        size = max(1, self.eval_batch_size // self.world)
        batches = list(zip(images.split(size), labels.split(size), strict=True))
        units = [places[start : start + size] for start in range(0, len(places), size)]
        normalize = self.pipeline.normalize

        def load(batches: Sequence[Batch]) -> Iterator[Batch]:
            return ((normalize.apply(images, ()), labels) for images, labels in batches)

        return EvaluationLoader(batches, load, units, count)

    def floors(self, split: str, steps: int) -> list[Floor]:
        """Return the floors of pixels between 0 and 1, without augmentation."""
        train, evaluated = self._pixels("train"), self._pixels(split)
        if self.data.num_classes:
            return class_floors(train, evaluated)
        return number_floors(train, evaluated)

    def _pixels(self, split: str) -> Samples:
        """Return the images of a split as rows of pixels."""
        images, labels = self.tensors[split]
        return Samples(images.flatten(1).float().div(255).cpu().numpy(), labels.cpu().numpy())

    def draw_order(self, epoch: int) -> Tensor:
        """Return `epoch_length` shuffled passes over the samples, one after the other."""
        count = len(self.tensors["train"][1])
        passes = self.data.epoch_length
        orders = []
        for number in range(epoch * passes, (epoch + 1) * passes):
            generator = torch_generator(self.seed, "order", number)
            orders.append(torch.randperm(count, generator=generator))
        return torch.cat(orders)


def statistics(images: NDArray[np.uint8]) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel, 0..1; 1 for a constant channel."""
    counts = np.zeros((images.shape[1], 256))
    # Histograms of 1000 images at a time: in float64 the set would need eight times its memory.
    for some in np.array_split(images, math.ceil(len(images) / 1000)):
        for channel in range(len(counts)):
            counts[channel] += np.bincount(some[:, channel].ravel(), minlength=256)
    shares = counts / counts.sum(1, keepdims=True)
    levels = np.arange(256) / 255
    mean = shares @ levels
    std = np.sqrt((shares * (levels - mean[:, None]) ** 2).sum(1))
    std[(counts > 0).sum(1) == 1] = 1
    return mean.tolist(), std.tolist()


def load_splits(data: Images) -> dict[str, Split]:
    """Return "train", "test" and, if it exists or is held out, "val"; raise ConfigError."""
    splits: dict[str, Split] = data.read_splits()
    for name, split in splits.items():
        check_split(name, split, data)
    train = splits["train"]
    held_out = hold_out(data.validation, "val" in splits, train.labels)
    for name, rows in held_out.items():
        splits[name] = Split(train.images[rows], train.labels[rows])
    if data.num_classes:
        labels = {name: split.labels for name, split in splits.items()}
        if "classes" in type(data).model_fields:
            require_used_classes(labels, data.num_classes)
        warn_of_missing_labels(labels, data.num_classes)
    return splits


def make_split(images: NDArray[np.uint8], labels: NDArray[Any], data: Images, where: str) -> Split:
    """Return images with classes (N,) int64, or with targets (N, outputs) float32.

    An error about the targets begins with `where`.
    """
    if data.num_outputs:
        targets = convert_targets(where, labels.reshape(len(labels), data.num_outputs))
        return Split(images, targets)
    return Split(images, labels.astype(np.int64).reshape(-1))


def fit_image(name: str, source: Path | bytes, data: OwnImages) -> NDArray[np.uint8]:
    """Return a picture as (C, H, W); raise ConfigError, which begins with `name`, if it is bad."""
    picture = read_picture(source, name, "RGB" if data.channels == 3 else "L")
    resized = picture.resize((data.size, data.size), Image.Resampling.BICUBIC)
    return np.asarray(resized).reshape(data.size, data.size, data.channels).transpose(2, 0, 1)


def check_split(name: str, split: Split, data: Images) -> None:
    """Raise ConfigError if the images or labels of a split are not those that `data` describes."""
    images, labels = split
    table = getattr(data, "files", {}).get(name, data.kind)
    source = f"data.path: {data.path}" if hasattr(data, "path") else f"data.{name}: {table}"
    if len(images) != len(labels):
        raise ConfigError(f"{source}: {name} has {len(images)} images and {len(labels)} labels")
    if images.shape[1:] != data.image_shape:
        raise ConfigError(
            f"{source}: {name} images are {images.shape[1:]} (C, H, W), configured "
            f"{data.image_shape}"
        )
    if not np.isfinite(labels).all():
        raise ConfigError(f"{source}: {name} has a target that is not a finite number")
    if data.num_classes and len(labels):
        require_classes(name, labels, data.num_classes)
