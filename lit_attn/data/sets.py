"""Image sets in memory: reading, checking and splitting them.

Shapes: images (N, C, H, W) uint8, labels (N,) int64.
"""

import hashlib
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lit_attn.data import images_config as config
from lit_attn.data.labels import require_used_classes, warn_of_missing_labels
from lit_attn.data.pictures import read_picture
from lit_attn.files import one_at_a_time
from lit_attn.schema.errors import ConfigError

SPLIT_SEED = 0  # Seed of the splits of all cells: seeds vary the training, not the data.


class Split(NamedTuple):
    """Images with their labels (N,) int64, or with targets (N, outputs) float32."""

    images: NDArray[np.uint8]
    labels: NDArray[Any]


def digest(parts: Iterable[bytes | str | NDArray[np.generic]]) -> str:
    """Return twelve hexadecimal digits of SHA-256 over bytes, text and arrays."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            total.update(part.encode())
        elif isinstance(part, np.ndarray):
            total.update(np.ascontiguousarray(part).data)
        else:
            total.update(part)
    return total.hexdigest()[:12]


def load(data: config.Images) -> dict[str, Split]:
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


def hold_out(count: int, has_val: bool, labels: NDArray[Any]) -> dict[str, NDArray[np.int64]]:
    """Return the training rows of "val" and "train" if `count` is positive, else nothing."""
    if not count:
        return {}
    if has_val:
        raise ConfigError(
            "data.validation: this data set has a validation split already; set it to 0"
        )
    chosen, rest = stratified(labels, count)
    return {"val": chosen, "train": rest}


def stratified(labels: NDArray[Any], count: int) -> tuple[NDArray[np.int64], ...]:
    """Return the indices of `count` samples, any classes in proportion, and those of the rest.

    The result is a function of the arguments. Raises ConfigError if fewer than two samples would
    remain or `count` misses a class.
    """
    from sklearn.model_selection import train_test_split

    strata = labels if labels.dtype.kind == "i" else None
    try:
        rest, chosen = train_test_split(
            np.arange(len(labels)), test_size=count, stratify=strata, random_state=SPLIT_SEED
        )
    except ValueError as error:
        raise ConfigError(f"data.validation: {count} of {len(labels)} samples: {error}") from error
    return np.sort(chosen), np.sort(rest)


def fingerprint(splits: dict[str, Split]) -> str:
    """Return a digest of all arrays with their names."""
    parts: list[str | NDArray[Any]] = []
    for name in sorted(splits):
        for array in splits[name]:
            parts.append(f"{name} {array.dtype} {array.shape}")
            parts.append(array)
    return digest(parts)


def read_digits(data: config.Digits) -> dict[str, Split]:
    """Return scikit-learn's digits in a fixed split: 1200, 237 and 360 images."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    # The 17 grey levels 0 to 16 are spread over a byte.
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = digits.target.astype(np.int64)
    test, rest = stratified(labels, 360)
    val, train = stratified(labels[rest], 237)
    rows = {"train": rest[train], "val": rest[val], "test": test}
    splits = {}
    for name, chosen in rows.items():
        splits[name] = Split(images[chosen], labels[chosen])
    return splits


def read_cifar(data: config.Cifar) -> dict[str, Split]:
    """Return torchvision's CIFAR, downloaded if it is missing; raise ConfigError."""
    import torchvision

    read = getattr(torchvision.datasets, data.kind.upper())
    splits = {}
    for name in ("train", "test"):
        try:
            # Cells that start together would write the same files.
            with one_at_a_time(data.root, data.kind):
                downloaded = read(data.root, train=name == "train", download=True)
        except (OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"data.root: {data.kind} is not in '{data.root}' and cannot be downloaded: {reason}"
            ) from error
        images = downloaded.data.transpose(0, 3, 1, 2)
        splits[name] = Split(images, np.asarray(downloaded.targets, dtype=np.int64))
    return splits


def read_npz(data: config.Npz | config.NpzTargets) -> dict[str, Split]:
    """Return the splits of one .npz file; raise ConfigError for a file of another layout."""
    where = f"data.path: {data.path}"
    arrays = _read_arrays(data.path, where)
    splits = {}
    for name in ("train", "val", "test"):
        if f"x_{name}" not in arrays and name == "val":
            continue
        for key in (f"x_{name}", f"y_{name}"):
            if key not in arrays:
                raise ConfigError(f"{where}: has no '{key}'; it has {', '.join(arrays)}")
        images = arrays[f"x_{name}"]
        if images.ndim == 3:
            images = images[..., None]
        if images.ndim != 4 or images.dtype != np.uint8:
            raise ConfigError(
                f"{where}: x_{name} must be uint8 of (N, H, W, C), is {images.dtype} of "
                f"{images.shape}"
            )
        labels = arrays[f"y_{name}"]
        _check_labels(labels, f"{where}: y_{name}", data.num_outputs)
        splits[name] = make_split(images.transpose(0, 3, 1, 2), labels, data)
    return splits


def _read_arrays(path: Path, where: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of images and labels of an .npz file; raise ConfigError."""
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("it holds a single array without a name; use numpy.savez")
            names = [name for name in archive.files if name[:2] in ("x_", "y_")]
            return {name: archive[name] for name in names}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if "contains pickled" in reason:
            # NumPy reports any file of another format so, and advises to load pickled objects.
            reason = "it is no file of numpy.savez"
        raise ConfigError(f"{where}: cannot be read as .npz: {reason}") from error


def _check_labels(labels: NDArray[Any], where: str, outputs: int) -> None:
    """Raise ConfigError unless `labels` are classes, or `outputs` numbers for each image."""
    if outputs:
        kinds = "iuf"
        needed = f"numbers of (N, {outputs})"
    else:
        kinds = "iu"
        needed = "integers of (N,)"
    has_size = labels.size == len(labels) * max(1, outputs)
    if labels.dtype.kind not in kinds or not has_size:
        raise ConfigError(f"{where} must be {needed}, is {labels.dtype} of {labels.shape}")


def make_split(images: NDArray[np.uint8], labels: NDArray[Any], data: config.Images) -> Split:
    """Return images with classes (N,) int64, or with targets (N, outputs) float32."""
    if data.num_outputs:
        return Split(images, labels.astype(np.float32).reshape(len(labels), data.num_outputs))
    return Split(images, labels.astype(np.int64).reshape(-1))


def fit_image(name: str, source: Path | bytes, data: config.OwnImages) -> NDArray[np.uint8]:
    """Return a picture as (C, H, W); raise ConfigError, which begins with `name`, if it is bad."""
    picture = read_picture(source, name, "RGB" if data.channels == 3 else "L")
    resized = picture.resize((data.size, data.size), Image.Resampling.BICUBIC)
    return np.asarray(resized).reshape(data.size, data.size, data.channels).transpose(2, 0, 1)


def check_split(name: str, split: Split, data: config.Images) -> None:
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


def require_classes(split: str, labels: NDArray[Any], classes: int) -> None:
    """Raise ConfigError if the labels of `split` are not all from 0 to `classes` - 1."""
    low, high = labels.min(), labels.max()
    if 0 <= low <= high < classes:
        return
    remedy = "labels start at 0"
    if low >= 0:
        remedy = f"set {high + 1}"
    if low > 0:
        remedy = f"subtract {low} from them, or {remedy}"
    raise ConfigError(
        f"data.classes: {classes}, but {split} has the labels {low} to {high}; {remedy}"
    )
