"""Images read from the disk for each batch, and augmented with timm's transforms in workers.

All random numbers of training step s are a pure function of (seed, s), whatever the number of
workers or processes. (timm's own loader seeds its workers, so it cannot resume within an epoch.)
MixUp and CutMix mix the images of one process, so a mixed batch depends on the number of processes.

Shapes: images (B, 3, S, S) float, normalised; labels (B,); mixed targets (B, classes).
"""

import io
import math
import re
import struct
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from timm.data import Mixup, auto_augment, create_dataset, create_transform, get_img_extensions
from timm.data.distributed_sampler import RepeatAugSampler
from torch import Tensor
from torch.utils.data import Dataset

from lit_attn.config.data.images import ClassFolders, ImageFiles, WebDataset
from lit_attn.data.loading import read_batches, use_seed
from lit_attn.data.module import DataModule, EvaluationLoader, numpy_generator
from lit_attn.data.sets import digest, find_class_folders, find_splits, hold_out, read_shard
from lit_attn.schema.errors import ConfigError

TAR_MEMBER = re.compile(r"\.tar \d+ \d+$")

# Errors that Pillow raises for a truncated, overwritten or absurdly large file.
DAMAGED = (OSError, SyntaxError, ValueError, struct.error, zlib.error)
UNREADABLE = (*DAMAGED, Image.DecompressionBombError)


class Files(NamedTuple):
    """The images of one split: names below `folder` (bytes), labels int64.

    The name of an image in a tar file is "file offset size". Workers share the memory of arrays,
    while reading a Python object copies its page.
    """

    folder: Path
    names: np.ndarray[Any, np.dtype[np.bytes_]]
    labels: np.ndarray[Any, np.dtype[np.int64]]

    def find(self, place: int) -> tuple[Path, int, int]:
        """Return the file of an image, its first byte and its number of bytes there (-1: all)."""
        name = self.names[place].decode()
        if not TAR_MEMBER.search(name):
            return self.folder / name, 0, -1
        shard, offset, size = name.rsplit(" ", 2)
        return self.folder / shard, int(offset), int(size)


class ImageFileData(DataModule):
    """Splits of one data set.

    Raises ConfigError for an unreadable image, and if the folders do not match `data`.
    """

    def __init__(self, data: ImageFiles, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        self.data = data
        files = data.list_files()
        self.train = Reader(data, files["train"], augmented=True)
        self.splits: list[str] = [name for name in ("val", "test") if name in files]
        self.evaluated = {name: Reader(data, files[name], augmented=False) for name in self.splits}
        self._fingerprint = fingerprint(files)
        augment = data.augment
        self.mixup: Mixup | None = None
        if augment.is_mixed:
            self.inseparable = 2
            alphas = (augment.mixup, augment.cutmix)
            self.mixup = Mixup(*alphas, label_smoothing=0.0, num_classes=data.classes)
        self.set_epoch(len(self.draw_order(0)), drop_last=True)

    def fingerprint(self) -> str:
        return self._fingerprint

    def train_batches(self, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        steps = range(start, stop)
        # An epoch has millions of samples, so they are drawn when they are needed.
        batches = map(self.samples, steps)
        for step, batch in zip(steps, self.read(self.train, batches), strict=True):
            yield *batch, step

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
            units, batches = [[len(images)]], [[(0, 0, self.data.size)]]
        return EvaluationLoader(batches, partial(self.read, images), units, len(images))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return (images, targets); a training batch, which has its step, is mixed here."""
        images, labels, *step = batch
        if self.mixup is None or not step:
            return images, labels
        drawn = numpy_generator(self.seed, f"mix {self.rank}", *step).integers(2**32)
        with use_seed(int(drawn)), patch("timm.data.mixup.rand_bbox", draw_box):
            return self.mixup(images, labels)

    def samples(self, step: int) -> list[tuple[int, int, int]]:
        """Return this process's images of a step: index in `train`, seed, size in pixels."""
        pixels = self.data.size_in(step // self.steps_per_epoch)
        rows = self.rows(step, self.draw_order)
        seeds = numpy_generator(self.seed, "sample", step).integers(2**32, size=len(rows)).tolist()
        return [(*row, pixels) for row in self.share(list(zip(rows, seeds, strict=True)))]

    def read(self, images: "Reader", batches: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches that workers read of `batches`, lists of samples, in their order."""
        return read_batches(images, batches, images.collate, self.data.workers, pinned=True)

    def draw_order(self, epoch: int) -> list[int]:
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
        return list(sampler)


def draw_box(shape: tuple[int, ...], weight: float, **_: Any) -> list[int]:
    """Draw CutMix's box as timm 0.3.2 does; later versions cover a pixel more of an odd side."""
    edges: list[int] = []
    for side in shape[-2:]:
        half, centre = int(side * math.sqrt(1 - weight)) // 2, np.random.randint(side)
        edges += [max(0, centre - half), min(side, centre + half)]
    return edges


def list_folders(data: ClassFolders) -> dict[str, Files]:
    """Return the files of "train", "test" and, if it exists or is held out, "val".

    Classes are numbered as timm does, by the natural order of train's folders. Raises ConfigError
    for a split or a class without images, and as `find_class_folders`.
    """
    files = {}
    classes: dict[str, int] = {}
    for split, folders in find_class_folders(data).items():
        folder = folders[0].parent
        try:
            reader = create_dataset("", str(folder), search_split=False, class_map=classes).reader
        except RuntimeError as error:
            raise ConfigError(f"data.path: {folder} has no class folders with images") from error
        classes = reader.class_to_idx
        if len(classes) != data.classes:
            text = f"images of {len(classes)} classes; images end in"
            ends = ", ".join(get_img_extensions())
            raise ConfigError(f"data.classes: {data.classes}, but {folder} has {text} {ends}")
        names = [str(Path(path).relative_to(folder)).encode() for path, _ in reader.samples]
        labels = np.asarray([label for _, label in reader.samples], np.int64)
        files[split] = Files(folder, np.asarray(names), labels)
    return _hold_out(data, files)


def list_shards(data: WebDataset) -> dict[str, Files]:
    """Return the images of "train", "test" and, if they exist or are held out, "val"."""
    files = {}
    for split, paths in find_splits(data.path, "*.tar", "*.tar files").items():
        samples = [sample for path in paths for sample in read_shard(data, path)]
        names = np.asarray([name.encode() for name, _ in samples])
        labels = np.asarray([label for _, label in samples], np.int64)
        files[split] = Files(paths[0].parent, names, labels)
    return _hold_out(data, files)


def _hold_out(data: ImageFiles, files: dict[str, Files]) -> dict[str, Files]:
    train = files["train"]
    for split, rows in hold_out(data.validation, "val" in files, train.labels).items():
        files[split] = Files(train.folder, train.names[rows], train.labels[rows])
    return files


def fingerprint(files: dict[str, Files]) -> str:
    """Return a digest of all names and labels, and of the sizes of the files of "test".

    Reading the sizes of 1.3 million training files takes minutes on a network disk.
    """
    names: list[Any] = []
    for split, listed in sorted(files.items()):
        names += f"{split} {len(listed.names)}\n", b"\n".join(listed.names), listed.labels
    test = files["test"]
    places = [test.find(place) for place in range(len(test.labels))]
    sizes = [path.stat().st_size if size < 0 else size for path, _, size in places]
    return digest([*names, np.asarray(sizes)])


class Reader(Dataset[Any]):
    """Data set that reads and transforms the images of a split: `reader[place, seed, size]`."""

    def __init__(self, data: ImageFiles, files: Files, *, augmented: bool) -> None:
        self.files = files
        sizes = {*data.sizes, data.size} if augmented else {data.size}
        self.transforms = {size: _transform(data, size, augmented) for size in sizes}

    def __len__(self) -> int:
        return len(self.files.labels)

    def __getitem__(self, sample: tuple[int, int, int]) -> tuple[Tensor, int]:
        """Return image (3, S, S) and label; raise ConfigError if the image is unreadable."""
        place, seed, size = sample
        path, offset, length = self.files.find(place)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                image = Image.open(io.BytesIO(file.read(length))).convert("RGB")
        except UNREADABLE as error:
            name = self.files.folder / self.files.names[place].decode()
            reason = " ".join(str(error).split())
            raise ConfigError(f"data.path: {name} is not a readable image: {reason}") from error
        with use_seed(seed):
            return self.transforms[size](image), int(self.files.labels[place])

    def collate(self, samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        images, labels = [image for image, _ in samples], [label for _, label in samples]
        size = max(self.transforms)
        stacked = torch.stack(images) if images else torch.empty(0, 3, size, size)
        return stacked, torch.tensor(labels, dtype=torch.long)


def _transform(data: ImageFiles, size: int, augmented: bool) -> Any:
    """Return timm's transform to a normalised tensor (3, size, size)."""
    create = partial(
        create_transform, size, interpolation=data.interpolation, mean=data.mean, std=data.std
    )
    augment = data.augment
    if not augmented:
        transform = create(crop_pct=data.crop_share)
        if augment.crop == "centre":
            transform.transforms[:2] = [partial(crop_centre, data, size, data.crop_share)]
        return transform
    try:
        # timm reads the table of operations when it makes the policy.
        names = [name for name in auto_augment.NAME_TO_OP if name.startswith("Posterize")]
        with patch.dict(auto_augment.NAME_TO_OP, dict.fromkeys(names, posterize)):
            transform = create(
                is_training=True,
                scale=augment.area,
                ratio=augment.aspect,
                hflip=augment.flip,
                color_jitter=0.0,
                auto_augment=augment.policy,
                re_prob=augment.erasing,
                re_mode="pixel",
            )
            if augment.crop == "centre":
                transform.transforms[0] = partial(crop_centre, data, size, 1.0)
            return transform
    except (AssertionError, KeyError, ValueError) as error:
        text = f"timm does not know '{augment.policy}': {error}"
        raise ConfigError(f"data.augment.policy: {text}") from error


def crop_centre(data: ImageFiles, size: int, share: float, image: Image.Image) -> Image.Image:
    """Return the central square after resizing the short side to size / share, as JiT's code."""
    short = math.floor(size / share)
    while min(image.size) >= 2 * short:
        image = image.resize([side // 2 for side in image.size], Image.Resampling.BOX)
    scale, method = short / min(image.size), Image.Resampling[data.interpolation.upper()]
    image = image.resize([round(side * scale) for side in image.size], method)
    left, top = ((side - size) // 2 for side in image.size)
    return image.crop((left, top, left + size, top + size))


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Return `image` with its highest `bits` bits per channel; black for 0 bits.

    timm asks for 0 bits at the largest magnitude, which random magnitudes reach; Pillow raises.
    """
    return image.point(lambda value: value & (256 - 2 ** (8 - bits)))
