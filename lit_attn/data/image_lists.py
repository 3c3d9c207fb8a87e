"""Lists of the images of a data set on the disk, in folders of classes or in tar files."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_attn.data.class_folders import read_class_folders
from lit_attn.data.folders import FolderReader, natural_order, require_splits
from lit_attn.data.images_config import ClassFolders, ImageFiles, WebDataset
from lit_attn.data.sets import digest, hold_out
from lit_attn.data.splits import warn_of_shared_files
from lit_attn.data.tar_shards import read_shard
from lit_attn.schema.errors import ConfigError

TAR_MEMBER = re.compile(r"\.tar \d+ \d+$")


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

    def describe(self, place: int) -> str:
        """Return the path of an image for a message, and its place in a tar file."""
        path, offset, size = self.find(place)
        return str(path) if size < 0 else f"{path}: the image of {size:,} bytes at byte {offset:,}"


def make_files(folder: Path, samples: list[tuple[str, int]]) -> Files:
    """Return the list of `samples`, which are names below `folder` and labels."""
    names = np.asarray([name.encode() for name, _ in samples])
    labels = np.asarray([label for _, label in samples], np.int64)
    return Files(folder, names, labels)


def list_folders(data: ClassFolders) -> dict[str, Files]:
    """Return the images of "train", "test" and, if it exists or is held out, "val".

    Images are in the natural order of their paths. Raises ConfigError and warns as
    `read_class_folders`.
    """
    trees = read_class_folders(data.path, data.classes)
    numbers = {name: number for number, name in enumerate(trees["train"].files)}
    files = {}
    for split, tree in trees.items():
        samples = []
        for name, images in tree.files.items():
            names = [str(image.relative_to(tree.folder)) for image in images]
            samples += [(image, numbers[name]) for image in names]
        samples.sort(key=lambda sample: natural_order(sample[0]))
        files[split] = make_files(tree.folder, samples)
    return _hold_out(data, files)


def list_shards(data: WebDataset) -> dict[str, Files]:
    """Return the images of "train", "test" and, if they exist or are held out, "val".

    Raises ConfigError for a folder or a tar file that cannot be read.
    """
    reader = FolderReader("data.path", [".tar"])
    shards: dict[str, list[Path]] = {}
    folders: dict[str, Path] = {}
    for split in ("train", "test", "val"):
        folder = data.path / split
        paths = reader.list_files(folder) if folder.is_dir() else []
        paths.sort(key=lambda path: natural_order(path.name))
        if paths:
            shards[split] = paths
            folders[split] = folder
    files = {}
    named_shards = require_splits(shards, data.path, "*.tar files")
    warn_of_shared_files(folders, "data.path")
    for split, paths in named_shards.items():
        samples: list[tuple[str, int]] = []
        for path in paths:
            samples.extend(read_shard(path, data.classes))
        if not samples:
            raise ConfigError(f"data.path: the tar files of {paths[0].parent} have no samples")
        files[split] = make_files(paths[0].parent, samples)
    reader.warn_of_left_out(data.path)
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
