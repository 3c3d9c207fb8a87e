"""Image sets as arrays: read, checked, split.

Shapes: images (N, C, H, W) uint8, labels (N,) int64.
"""

import hashlib
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lit_attn.config.data.images import Cifar, Digits, Folder, Given, Images, Npz
from lit_attn.files import one_at_a_time
from lit_attn.schema.errors import ConfigError

# Splits are drawn once for all seeds: a seed varies the training, not the question.
SPLIT_SEED = 0

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm"}


class Split(NamedTuple):
    """Images with their labels."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


def load(data: Images) -> dict[str, Split]:
    """Every split that `data` has: "train", "test" and, where asked for or given, "val".

    Raises ConfigError naming the file or folder that is missing or not what it should be.
    """
    if isinstance(data, Digits):
        splits = _digits()
    elif isinstance(data, Cifar):
        splits = _cifar(data)
    elif isinstance(data, Npz):
        splits = _npz(data)
    else:
        assert isinstance(data, Folder)
        splits = _folder(data)
    for name, split in splits.items():
        _check(name, split, data)
    if data.validation:
        if "val" in splits:
            raise ConfigError("data.validation: this data set has a validation split of its own")
        held, kept = stratified(splits["train"].labels, data.validation)
        train = splits["train"]
        splits["val"] = Split(train.images[held], train.labels[held])
        splits["train"] = Split(train.images[kept], train.labels[kept])
    return splits


def glance(data: Given) -> None:
    """ConfigError as `load` has it, for what headers, labels and names of files can tell."""
    if isinstance(data, Npz):
        splits = _npz(data, headers=True)
        for name, split in splits.items():
            _check(name, split, data)
        samples = len(splits["train"].labels)
    else:
        assert isinstance(data, Folder)
        samples = len(_listed(data)["train"])
    if data.drop_last and data.batch_size > data.epoch_length * (samples - data.validation):
        raise ConfigError(
            f"data.batch_size: {data.batch_size} is more than the "
            f"{data.epoch_length * (samples - data.validation)} samples of an epoch"
        )


def stratified(labels: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], ...]:
    """Indices of `count` samples with every class in proportion, and of the rest; always the same.

    Raises ConfigError where fewer than two samples would remain or `count` misses a class.
    """
    from sklearn.model_selection import train_test_split

    try:
        kept, held = train_test_split(
            np.arange(len(labels)), test_size=count, stratify=labels, random_state=SPLIT_SEED
        )
    except ValueError as error:
        raise ConfigError(f"data.validation: {count} of {len(labels)} samples: {error}") from error
    return np.sort(held), np.sort(kept)


def fingerprint(splits: dict[str, Split]) -> str:
    """Twelve hexadecimal digits over every array: its name, shape, type and bytes."""
    digest = hashlib.sha256()
    for name, split in sorted(splits.items()):
        for array in split:
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:12]


def _digits() -> dict[str, Split]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    # Sixteen grey levels, spread over a byte.
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = digits.target.astype(np.int64)
    test, rest = stratified(labels, 360)
    held, kept = stratified(labels[rest], 237)
    parts = {"train": rest[kept], "val": rest[held], "test": test}
    return {name: Split(images[index], labels[index]) for name, index in parts.items()}


def _cifar(data: Cifar) -> dict[str, Split]:
    import torchvision

    kind = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}
    splits = {}
    for name in ("train", "test"):
        try:
            # Cells that start together would all write the same files.
            with one_at_a_time(data.root, data.kind):
                found = kind[data.kind](data.root, train=name == "train", download=True)
        except (OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"data.root: {data.kind} is not in '{data.root}' and cannot be downloaded: {reason}"
            ) from error
        images = np.ascontiguousarray(found.data.transpose(0, 3, 1, 2))
        splits[name] = Split(images, np.asarray(found.targets, dtype=np.int64))
    return splits


def _npz(data: Npz, headers: bool = False) -> dict[str, Split]:
    """The arrays; with `headers` images of the right shape and type that take no memory."""
    try:
        with data.path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("it holds a single array without a name")
            known = [name for name in archive.files if name[:2] in ("x_", "y_")]
            arrays = {
                name: _stand_in(archive, name) if headers and name[0] == "x" else archive[name]
                for name in known
            }
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{data.path}: cannot be read as .npz: {error}") from error
    splits = {}
    for name in ("train", "val", "test"):
        if f"x_{name}" not in arrays and name == "val":
            continue
        for key in (f"x_{name}", f"y_{name}"):
            if key not in arrays:
                raise ConfigError(f"{data.path}: has no '{key}'; it has {', '.join(arrays)}")
        images = arrays[f"x_{name}"]
        if images.ndim == 3:
            images = images[..., None]
        if images.ndim != 4 or images.dtype != np.uint8:
            raise ConfigError(
                f"{data.path}: x_{name} must be uint8 of (N, H, W, C), is {images.dtype} of "
                f"{images.shape}"
            )
        labels = arrays[f"y_{name}"]
        if labels.dtype.kind not in "iu" or labels.size != len(labels):
            raise ConfigError(
                f"{data.path}: y_{name} must be integers of (N,), is {labels.dtype} of "
                f"{labels.shape}"
            )
        images = images.transpose(0, 3, 1, 2)
        images = images if headers else np.ascontiguousarray(images)
        splits[name] = Split(images, labels.astype(np.int64).reshape(-1))
    return splits


def _stand_in(archive: Any, name: str) -> NDArray[Any]:
    """One zero, seen as an array of the shape and type that the header says."""
    with archive.zip.open(f"{name}.npy") as file:
        first = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    return np.broadcast_to(np.zeros((), dtype), shape)


def _folder(data: Folder) -> dict[str, Split]:
    splits = {}
    for name, files in _listed(data).items():
        images = [_read_image(path, data.size, data.channels) for path, _ in files]
        labels = np.asarray([label for _, label in files], dtype=np.int64)
        splits[name] = Split(np.stack(images), labels)
    return splits


def _listed(data: Folder) -> dict[str, list[tuple[Path, int]]]:
    """The images of every split, each with its label."""
    names = ["train", "test"] + (["val"] if (data.path / "val").is_dir() else [])
    classes = _subfolders(data.path / "train")
    if len(classes) != data.classes:
        raise ConfigError(
            f"data.classes: {data.classes}, but {data.path / 'train'} has {len(classes)} folders"
        )
    found = {}
    for name in names:
        extra = sorted(set(_subfolders(data.path / name)) - set(classes))
        if extra:
            raise ConfigError(f"{data.path / name / extra[0]}: no such class in train")
        found[name] = [
            (path, label)
            for label, folder in enumerate(classes)
            for path in sorted((data.path / name / folder).glob("*"))
            if path.suffix.lower() in IMAGE_SUFFIXES
        ]
        if not found[name]:
            raise ConfigError(f"{data.path / name}: holds no images")
    return found


def _subfolders(path: Path) -> list[str]:
    if not path.is_dir():
        raise ConfigError(f"{path}: is not a folder")
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


def _read_image(path: Path, size: int, channels: int) -> NDArray[np.uint8]:
    try:
        with Image.open(path) as image:
            converted = image.convert("RGB" if channels == 3 else "L")
            resized = converted.resize((size, size), Image.Resampling.BICUBIC)
    except OSError as error:
        raise ConfigError(f"{path}: is not a readable image: {error}") from error
    return np.asarray(resized).reshape(size, size, channels).transpose(2, 0, 1)


def _check(name: str, split: Split, data: Images) -> None:
    images, labels = split
    where = data.path if isinstance(data, Given) else data.kind
    if len(images) != len(labels):
        raise ConfigError(f"{where}: {name} has {len(images)} images and {len(labels)} labels")
    if images.shape[1:] != data.image_shape:
        raise ConfigError(
            f"{where}: {name} images are {images.shape[1:]} (C, H, W), "
            f"configured {data.image_shape}"
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() < data.num_classes:
        raise ConfigError(
            f"{where}: {name} labels go from {labels.min()} to {labels.max()}, "
            f"configured are {data.num_classes} classes"
        )
