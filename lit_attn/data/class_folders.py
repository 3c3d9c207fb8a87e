"""Images in class folders: found and read with timm, transformed, and skipped where unreadable.

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
from lit_attn.data.sets import stratified
from lit_attn.schema.errors import ConfigError

# What Pillow raises on a file cut short, overwritten or absurdly large.
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

    Arrays and no lists: workers share them, where every look at a Python object copies its page.
    """

    folder: Path
    names: np.ndarray[Any, np.dtype[np.bytes_]]
    labels: np.ndarray[Any, np.dtype[np.int64]]


def find(data: ClassFolders) -> dict[str, Files]:
    """The files of "train", "test" and, where images are held out, "val".

    Classes are numbered as timm does, by the natural order of train's folders. Raises ConfigError
    for a folder that is missing, empty, or of a class that train does not have.
    """
    train, classes = _files(data.path / "train", None)
    if len(classes) != data.classes:
        raise ConfigError(
            f"data.classes: {data.classes}, but {data.path / 'train'} has images of {len(classes)}"
        )
    found = {"train": train, "test": _files(data.path / "val", classes)[0]}
    if data.validation:
        held, kept = stratified(train.labels, data.validation)
        for name, places in (("val", held), ("train", kept)):
            found[name] = Files(train.folder, train.names[places], train.labels[places])
    return found


def _files(folder: Path, classes: dict[str, int] | None) -> tuple[Files, dict[str, int]]:
    if not folder.is_dir():
        raise ConfigError(f"data.path: {folder} is not a folder; train/CLASS and val/CLASS hold it")
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


def fingerprint(found: dict[str, Files]) -> str:
    """Twelve hexadecimal digits over the names and labels of all, and the sizes of "test"."""
    digest = hashlib.sha256()
    for split, files in sorted(found.items()):
        digest.update(f"{split} {len(files.names)}\n".encode())
        digest.update(b"\n".join(files.names.tolist()))
        digest.update(files.labels.tobytes())
    test = found["test"]
    sizes = [(test.folder / name.decode()).stat().st_size for name in test.names.tolist()]
    digest.update(np.asarray(sizes).tobytes())
    return digest.hexdigest()[:12]


class Failure(NamedTuple):
    """An image that cannot be read, and why."""

    path: Path
    reason: str


class Sample(NamedTuple):
    """One image (3, S, S), or none, and what could not be read on the way to it."""

    image: Tensor | None
    label: int
    failures: list[Failure]


class Read(NamedTuple):
    """The images of one batch that could be read, their labels, and what could not."""

    images: Tensor
    labels: Tensor
    failures: list[Failure]


class Reader(Dataset[Sample]):
    """Reads and transforms the images of a split: `reader[place, seed, size]`.

    Where `augmented`, all that is drawn comes from the seed, and the next image that can be read
    takes the place of one that cannot.
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

    def together(self, samples: list[Sample]) -> Read:
        """A batch of what could be read."""
        images = [sample.image for sample in samples if sample.image is not None]
        labels = [sample.label for sample in samples if sample.image is not None]
        size = max(self.transforms)
        return Read(
            torch.stack(images) if images else torch.empty(0, 3, size, size),
            torch.tensor(labels, dtype=torch.long),
            [failure for sample in samples for failure in sample.failures],
        )


class Skipped:
    """The images that could not be read, each counted once and named in the log."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.paths: set[Path] = set()

    def note(self, failures: list[Failure]) -> None:
        """Raises ConfigError past the limit."""
        for path, reason in failures:
            if path in self.paths:
                continue
            self.paths.add(path)
            if len(self.paths) > self.limit:
                raise ConfigError(
                    f"data.unreadable: {len(self.paths)} images cannot be read, more than the "
                    f"{self.limit} to skip; the last: {path}: {reason}"
                )
            place = f"{len(self.paths)} of at most {self.limit}"
            print(f"skipped an image that cannot be read ({place}): {path}: {reason}", flush=True)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from `seed` alone: timm draws from the global generators, which are put back after."""
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
    """timm's transform to a normalised tensor (3, size, size)."""
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
            # Of the crops that keep an image's shape, without a change of scale or aspect.
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
    """What a policy of timm's chooses from; nothing for any other transform."""
    if isinstance(step, auto_augment.RandAugment | auto_augment.AugMixAugment):
        return list(step.ops)
    if isinstance(step, auto_augment.AutoAugment):
        return [op for pair in step.policy for op in pair]
    return []


def posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """`image` with its highest `bits` bits per channel; black at 0, which Pillow refuses by now.

    timm asks for 0 at the largest magnitude, which a random one about 9 of 10 reaches at times.
    """
    if bits < 1:
        return Image.new(image.mode, image.size)
    kept: Image.Image = auto_augment.posterize(image, bits)
    return kept
