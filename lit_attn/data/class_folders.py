"""Images in class folders: listed, read and transformed with timm; unreadable ones are skipped.

Shapes: images (B, 3, S, S) float, normalised; labels (B,).
"""

import contextlib
import hashlib
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment, create_dataset, create_transform
from torch import Tensor
from torch.utils.data import Dataset

from lit_attn.config.data.class_folders import ClassFolders
from lit_attn.data.sets import HAS_VALIDATION, find_split_folders, stratified
from lit_attn.schema.errors import ConfigError

# Errors that Pillow raises for a truncated, overwritten or absurdly large file.
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


class Files(NamedTuple):
    """The images of one split: names below `folder` (bytes), labels int64.

    Arrays instead of lists: workers share their memory, while reading a Python object copies its
    page.
    """

    folder: Path
    names: np.ndarray[Any, np.dtype[np.bytes_]]
    labels: np.ndarray[Any, np.dtype[np.int64]]


def list_files(data: ClassFolders) -> dict[str, Files]:
    """Return the files of "train", "test" and, if it exists or is held out, "val".

    Classes are numbered as timm does, by the natural order of train's folders. Raises ConfigError
    for a folder that is missing, empty, or of a class that train does not have.
    """
    folders = find_split_folders(data.path)
    train, classes = _files(folders.pop("train"), None)
    if len(classes) != data.classes:
        raise ConfigError(
            f"data.classes: {data.classes}, but {data.path / 'train'} has images of {len(classes)}"
        )
    files = {split: _files(folder, classes)[0] for split, folder in folders.items()}
    files["train"] = train
    if data.validation:
        if "val" in files:
            raise ConfigError(HAS_VALIDATION)
        held, kept = stratified(train.labels, data.validation)
        for name, places in (("val", held), ("train", kept)):
            files[name] = Files(train.folder, train.names[places], train.labels[places])
    return files


def _files(folder: Path, classes: dict[str, int] | None) -> tuple[Files, dict[str, int]]:
    folders = {entry.name for entry in folder.iterdir() if entry.is_dir()}
    unknown = sorted(folders - set(folders if classes is None else classes))
    if unknown:
        raise ConfigError(f"data.path: {folder / unknown[0]}: no such class in train")
    try:
        dataset = create_dataset("", str(folder), search_split=False, class_map=classes or {})
    except RuntimeError as error:
        raise ConfigError(f"data.path: {folder} has no class folders with images") from error
    reader = dataset.reader
    names = [str(Path(path).relative_to(folder)).encode() for path, _ in reader.samples]
    labels = np.asarray([label for _, label in reader.samples], dtype=np.int64)
    return Files(folder, np.asarray(names), labels), reader.class_to_idx


def fingerprint(files: dict[str, Files]) -> str:
    """Return twelve hexadecimal digits of a hash over all names and labels, and "test"'s sizes."""
    digest = hashlib.sha256()
    for split, listed in sorted(files.items()):
        digest.update(f"{split} {len(listed.names)}\n".encode())
        digest.update(b"\n".join(listed.names.tolist()))
        digest.update(listed.labels.tobytes())
    test = files["test"]
    sizes = [(test.folder / name.decode()).stat().st_size for name in test.names.tolist()]
    digest.update(np.asarray(sizes).tobytes())
    return digest.hexdigest()[:12]


class Failure(NamedTuple):
    """Path of an image that cannot be read, and the reason."""

    path: Path
    reason: str


class Sample(NamedTuple):
    """One image (3, S, S) or None, its label, and the unreadable images tried before it."""

    image: Tensor | None
    label: int
    failures: list[Failure]


class Read(NamedTuple):
    """Readable images of one batch, their labels, and the unreadable images."""

    images: Tensor
    labels: Tensor
    failures: list[Failure]


class Reader(Dataset[Sample]):
    """Data set that reads and transforms the images of a split: `reader[place, seed, size]`.

    If `augmented`, all random numbers come from the seed, and the next readable image replaces an
    unreadable one.
    """

    def __init__(self, data: ClassFolders, files: Files, *, augmented: bool) -> None:
        self.files = files
        self.tries = 1 + (data.unreadable if augmented else 0)
        sizes = {*data.sizes, data.size} if augmented else {data.size}
        self.transforms = {size: _transform(data, size, augmented) for size in sizes}

    def __len__(self) -> int:
        return len(self.files.labels)

    def __getitem__(self, sample: tuple[int, int, int]) -> Sample:
        first, seed, size = sample
        failures = []
        for place in range(first, first + self.tries):
            name, label = (part[place % len(self)] for part in self.files[1:])
            path = self.files.folder / name.decode()
            try:
                with Image.open(path) as file:
                    image = file.convert("RGB")
            except UNREADABLE as error:
                failures.append(Failure(path, " ".join(str(error).split())))
                continue
            with seeded(seed):
                return Sample(self.transforms[size](image), int(label), failures)
        return Sample(None, 0, failures)

    def collate(self, samples: list[Sample]) -> Read:
        """Return the batch of the readable images."""
        images = [sample.image for sample in samples if sample.image is not None]
        labels = [sample.label for sample in samples if sample.image is not None]
        size = max(self.transforms)
        return Read(
            torch.stack(images) if images else torch.empty(0, 3, size, size),
            torch.tensor(labels, dtype=torch.long),
            [failure for sample in samples for failure in sample.failures],
        )


class Skipped:
    """Set of the unreadable images; each is counted once and named in the log."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.paths: set[Path] = set()

    def record(self, failures: list[Failure]) -> None:
        """Add `failures` and log the new ones; raise ConfigError above the limit."""
        for path, reason in failures:
            if path in self.paths:
                continue
            self.paths.add(path)
            if len(self.paths) > self.limit:
                raise ConfigError(
                    f"data.unreadable: {len(self.paths)} images cannot be read, more than the "
                    f"limit of {self.limit}; the last: {path}: {reason}"
                )
            place = f"{len(self.paths)} of at most {self.limit}"
            print(f"skipped an image that cannot be read ({place}): {path}: {reason}", flush=True)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators, from which timm draws, and restore their states afterwards."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _transform(data: ClassFolders, size: int, augmented: bool) -> Any:
    """Return timm's transform to a normalised tensor (3, size, size)."""
    if not augmented:
        return create_transform(
            size,
            interpolation=data.interpolation,
            mean=data.mean,
            std=data.std,
            crop_pct=data.crop_share,
        )
    augment = data.augment
    resized = augment.crop == "resized"
    try:
        transform = create_transform(
            size,
            is_training=True,
            # "rkrc" keeps the aspect of the image, and with these arguments also its scale.
            train_crop_mode="rrc" if resized else "rkrc",
            scale=augment.area if resized else (1.0, 1.0),
            ratio=augment.aspect if resized else (1.0, 1.0),
            hflip=augment.flip,
            color_jitter=augment.jitter,
            auto_augment=augment.policy,
            interpolation=data.interpolation,
            mean=data.mean,
            std=data.std,
            re_prob=augment.erasing,
            re_mode="pixel",
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise ConfigError(
            f"data.augment.policy: timm does not know '{augment.policy}': {error}"
        ) from error
    for step in transform.transforms:
        for op in _operations(step):
            if op.aug_fn is auto_augment.posterize:
                op.aug_fn = posterize
    return transform


def _operations(step: Any) -> list[auto_augment.AugmentOp]:
    """Return the operations that a policy of timm chooses from; none for other transforms."""
    if isinstance(step, auto_augment.RandAugment | auto_augment.AugMixAugment):
        return list(step.ops)
    if isinstance(step, auto_augment.AutoAugment):
        return [op for pair in step.policy for op in pair]
    return []


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Return `image` with its highest `bits` bits per channel; black for 0 bits.

    timm asks for 0 bits at the largest magnitude, which random magnitudes reach; Pillow raises.
    """
    if bits < 1:
        return Image.new(image.mode, image.size)
    kept: Image.Image = auto_augment.posterize(image, bits)
    return kept
