"""Images read from the disk for each batch, and augmented with timm's transforms in workers.

All random numbers of training step s are a pure function of (seed, s), whatever the number of
workers or processes. (timm's own loader seeds its workers, so it cannot resume within an epoch.)
MixUp and CutMix mix the images of one process, so a mixed batch depends on the number of processes.

Shapes: images (B, 3, S, S) float, normalised; labels (B,); mixed targets (B, classes).
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from lit_attn.data.augment.timm_augmentation import (
    TimmAugmentation,
    make_evaluation_transform,
    make_training_transform,
    mix_batch,
)
from lit_attn.data.base import Data, require_split_folders
from lit_attn.data.image_lists import Files, fingerprint
from lit_attn.data.labels import (
    measure_largest_class,
    require_used_classes,
    warn_of_missing_labels,
)
from lit_attn.data.loading import check_samples, use_seed
from lit_attn.data.module import DataModule, EvaluationLoader, numpy_generator
from lit_attn.data.pictures import read_picture
from lit_attn.data.unreadable import UnreadableImages
from lit_attn.floors.base import FREQUENT_CLASS
from lit_attn.schema.base import consistency_check, outside_identity
from lit_attn.schema.errors import ConfigError
from lit_attn.signatures import ImageLabels

Count = Annotated[int, Field(ge=0)]
ChannelMeans = tuple[float, float, float]
ChannelDeviations = tuple[PositiveFloat, PositiveFloat, PositiveFloat]

Sample = tuple[int, int, int]
"""Index of an image, the seed of its augmentation, and its size in pixels."""


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
    floor_rules: ClassVar = (FREQUENT_CLASS,)

    def signature(self) -> ImageLabels:
        return ImageLabels((3, self.size, self.size), self.classes, self.sizes)

    def check_files(self) -> None:
        super().check_files()
        require_split_folders("data.path", self.path)

    def build(self, seed: int, device: torch.device) -> "ImageFileData":
        return ImageFileData(self, seed, device)

    @abstractmethod
    def list_files(self) -> dict[str, Files]:
        """Return the files of "train", "test" and perhaps "val"."""

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


class ImageFileData(DataModule):
    """Splits of one data set.

    Raises ConfigError for more unreadable images than `data.unreadable`, and if the folders do not
    match `data`.
    """

    def __init__(self, data: ImageFiles, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        self.data = data
        files = data.list_files()
        labels = {split: listed.labels for split, listed in files.items()}
        require_used_classes(labels, data.classes)
        warn_of_missing_labels(labels, data.classes)
        self.largest_class = measure_largest_class(labels)
        self.unreadable = UnreadableImages(data.unreadable)
        self.train = Reader(data, "train", files, self.unreadable)
        self.splits: list[str] = [name for name in ("val", "test") if name in files]
        self.evaluated = {}
        for name in self.splits:
            self.evaluated[name] = Reader(data, name, files, self.unreadable)
        self.evaluation_workers = self.make_workers(self.evaluated_batch)
        self._fingerprint = fingerprint(files)
        if data.augment.is_mixed:
            self.inseparable = 2
        self.set_epoch(len(self.draw_order(0)), drop_last=True)

    def fingerprint(self) -> str:
        return self._fingerprint

    def check(self) -> None:
        """Decode images of every split for a limited time; raise ConfigError for a bad one."""
        super().check()
        for reader in (self.train, *self.evaluated.values()):
            check_samples(len(reader), reader.try_to_open)

    def train_batches(self, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        self._open_record(is_new=start == 0)
        return super().train_batches(start, stop)

    def _open_record(self, *, is_new: bool) -> None:
        """Record the unreadable images in the folder of the cell."""
        if self.trainer is not None and self.unreadable.folder is None:
            folder = Path(self.trainer.default_root_dir)
            self.unreadable.open_record(folder, self.rank, is_new=is_new)

    def batch(self, step: int) -> tuple[Tensor, Tensor, int]:
        """Return this process's images and labels of a training step, and the step."""
        samples = [self.train.read_or_replace(sample) for sample in self.samples(step)]
        images, labels = self.train.collate(samples)
        return images, labels, step

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        """Return a loader of as many batches on every process; sizes differ by at most one.

        A process without images has the first one as padding.
        """
        images = self.evaluated[split]
        count = math.ceil(len(images) / self.eval_batch_size)
        parts = np.array_split(self.share(np.arange(len(images))), count)
        units = [part.tolist() for part in parts]
        batches = [[(place, 0, self.data.size) for place in part] for part in units]
        if not any(units):
            units = [[len(images)]]
            batches = [[(0, 0, self.data.size)]]
        load = partial(self.read, split, units)
        return EvaluationLoader(batches, load, units, len(images))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return (images, targets); a training batch, which has its step, is mixed here."""
        images, labels, *step = batch
        augment = self.data.augment
        if not augment.is_mixed or not step:
            return images, labels
        seed = int(numpy_generator(self.seed, f"mix {self.rank}", *step).integers(2**32))
        return mix_batch(images, labels, self.data.classes, augment, seed)

    def samples(self, step: int) -> list[Sample]:
        """Return this process's samples of a training step."""
        pixels = self.data.size_in(step // self.steps_per_epoch)
        rows = self.rows(step, self.draw_order)
        seeds = numpy_generator(self.seed, "sample", step).integers(2**32, size=len(rows))
        share = zip(self.share(rows).tolist(), self.share(seeds).tolist(), strict=True)
        return [(row, seed, pixels) for row, seed in share]

    def read(
        self, split: str, units: list[list[int]], batches: Sequence[list[Sample]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of lists of samples of an evaluated split, in their order.

        Images that cannot be read are left out, of the batch and of its list in `units`. A batch
        without any other image has one that is padding.
        """
        self._open_record(is_new=False)
        count = len(self.evaluated[split])
        keys = ((split, samples) for samples in batches)
        for number, batch in enumerate(self.evaluation_workers.read(keys)):
            images, labels, is_read = batch
            if not all(is_read):
                places = zip(units[number], is_read, strict=True)
                units[number] = [place for place, is_kept in places if is_kept] or [count]
            yield images, labels

    def evaluated_batch(self, key: tuple[str, list[Sample]]) -> tuple[Tensor, Tensor, list[bool]]:
        """Return the images and labels of the readable samples of a split, and which these are."""
        split, samples = key
        reader = self.evaluated[split]
        read = [reader.read(sample) for sample in samples]
        kept = [sample for sample in read if sample is not None]
        if samples and not kept:
            kept = [reader.read_or_replace(samples[0])]
        images, labels = reader.collate(kept)
        return images, labels, [sample is not None for sample in read]

    def stop_workers(self) -> None:
        super().stop_workers()
        self.evaluation_workers.close()

    def draw_order(self, epoch: int) -> NDArray[np.int64]:
        from timm.data.distributed_sampler import RepeatAugSampler

        repeats = self.data.repeats
        sampler = RepeatAugSampler(
            range(len(self.train)),
            num_replicas=1,
            rank=0,
            num_repeats=repeats,
            # DeiT's sampler, which timm copies, rounds an epoch of repeats down.
            selected_round=256 if repeats > 1 else 0,
        )
        sampler.set_epoch(int(numpy_generator(self.seed, "order", epoch).integers(2**63)))
        # Every worker keeps the order of an epoch: a list would need four times the memory.
        return np.fromiter(sampler, np.int64)


class Reader:
    """Reader and transform of the images of one split."""

    def __init__(
        self, data: ImageFiles, split: str, files: Mapping[str, Files], unreadable: UnreadableImages
    ) -> None:
        self.split = split
        self.files = files[split]
        self.unreadable = unreadable
        is_augmented = split == "train"
        make_transform = make_training_transform if is_augmented else make_evaluation_transform
        sizes = {*data.sizes, data.size} if is_augmented else {data.size}
        self.transforms = {size: make_transform(data, size) for size in sizes}

    def __len__(self) -> int:
        return len(self.files.labels)

    def read(self, sample: Sample) -> tuple[Tensor, int] | None:
        """Return image (3, S, S) and label; None if the image is left out as unreadable.

        Raises ConfigError as `UnreadableImages.leave_out`.
        """
        place, seed, size = sample
        image = self.try_to_open(place)
        if image is None:
            return None
        with use_seed(seed):
            return self.transforms[size](image), int(self.files.labels[place])

    def read_or_replace(self, sample: Sample) -> tuple[Tensor, int]:
        """Return a sample, or that of the next place with a readable image.

        Raises ConfigError as `read`, and if no image of the split can be read.
        """
        place, seed, size = sample
        for offset in range(len(self)):
            read = self.read(((place + offset) % len(self), seed, size))
            if read is not None:
                return read
        raise ConfigError(f"data.path: no image of {self.split} in {self.files.folder} can be read")

    def try_to_open(self, place: int) -> Image.Image | None:
        """Return the RGB picture of an image; None if it is left out as unreadable."""
        try:
            return self.open(place)
        except ConfigError as error:
            self.unreadable.leave_out(self.split, self.files.describe(place), error)
            return None

    def open(self, place: int) -> Image.Image:
        """Return the RGB picture of an image; raise ConfigError if it is unreadable."""
        name = f"data.path: {self.files.describe(place)}"
        path, offset, length = self.files.find(place)
        if length < 0:
            return read_picture(path, name, "RGB")
        try:
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read(length)
        except OSError as error:
            raise ConfigError(
                f"{name} cannot be read: {error.strerror}; restore the file"
            ) from error
        return read_picture(content, name, "RGB")

    def collate(self, samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        """Return the images (B, 3, S, S) and labels (B,) of a batch, which may be empty."""
        images = [image for image, _ in samples]
        labels = [label for _, label in samples]
        size = max(self.transforms)
        stacked = torch.stack(images) if images else torch.empty(0, 3, size, size)
        return stacked, torch.tensor(labels, dtype=torch.long)
