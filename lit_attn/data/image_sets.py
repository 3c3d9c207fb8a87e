"""Images in memory, and their files: digits, CIFAR, and .npz files of the user.

Shapes: images (N, C, H, W) uint8, labels (N,) int64.
"""

import zipfile
import zlib
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from lit_attn.data.images import ClassImages, OwnClasses, OwnTargets, make_split
from lit_attn.data.sets import Split, stratified
from lit_attn.files import one_at_a_time
from lit_attn.schema.base import outside_identity
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.mistakes import first_line


class Digits(ClassImages, kind="digits"):
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, in a fixed stratified split."""

    validation: Literal[0] = Field(0, description="0, because the data has a validation split")
    training_images: ClassVar = 1200
    image_shape: ClassVar = (1, 8, 8)
    num_classes: ClassVar = 10

    def read_splits(self) -> dict[str, Split]:
        return read_digits()


def read_digits() -> dict[str, Split]:
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


class Cifar(ClassImages):
    """torchvision's copy of CIFAR below `root`, downloaded if it is missing."""

    has_val_files = False
    root: Path = outside_identity(Path("data"), "folder of torchvision's files")
    training_images: ClassVar = 50_000
    image_shape: ClassVar = (3, 32, 32)

    def read_splits(self) -> dict[str, Split]:
        return read_cifar(self)


class Cifar10(Cifar, kind="cifar10"):
    """CIFAR-10: 50,000 training and 10,000 test images of 32 x 32 pixels in 10 classes."""

    num_classes: ClassVar = 10


class Cifar100(Cifar, kind="cifar100"):
    """CIFAR-100: 50,000 training and 10,000 test images of 32 x 32 pixels in 100 classes."""

    num_classes: ClassVar = 100


def read_cifar(data: Cifar) -> dict[str, Split]:
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
            raise ConfigError(
                f"data.root: {data.kind} is not in '{data.root}' and cannot be downloaded: "
                f"{first_line(error)}"
            ) from error
        images = downloaded.data.transpose(0, 3, 1, 2)
        splits[name] = Split(images, np.asarray(downloaded.targets, dtype=np.int64))
    return splits


class Npz(OwnClasses, kind="npz"):
    """One .npz with x_train, y_train, x_test, y_test (uint8, NHWC)."""

    path: Path = outside_identity(..., "file of the images")

    def read_splits(self) -> dict[str, Split]:
        return read_npz(self)

    def check_files(self) -> None:
        super().check_files()
        require_arrays(self.path)


class NpzTargets(OwnTargets, kind="npz-targets"):
    """One .npz with x_train and x_test (uint8, NHWC), y_train and y_test (numbers; N, outputs)."""

    path: Path = outside_identity(..., "file of the images")
    outputs: PositiveInt = Field(1, description="numbers to predict for each image")

    @property
    def num_outputs(self) -> int:
        return self.outputs

    def read_splits(self) -> dict[str, Split]:
        return read_npz(self)

    def check_files(self) -> None:
        super().check_files()
        require_arrays(self.path)


def require_arrays(path: Path) -> None:
    """Raise ConfigError unless an .npz file has images and labels of train and test.

    Only the directory of the file is read. `read_splits` reports a file of another format.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile):
        return
    for name in ("x_train", "y_train", "x_test", "y_test"):
        if name not in names:
            raise ConfigError(f"data.path: {path}: has no '{name}'; it has {', '.join(names)}")


def read_npz(data: Npz | NpzTargets) -> dict[str, Split]:
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
        pixels = images.transpose(0, 3, 1, 2)
        splits[name] = make_split(pixels, labels, data, f"{where}: y_{name}")
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
