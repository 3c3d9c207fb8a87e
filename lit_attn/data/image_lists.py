"""Lists of the images of a data set on the disk, in folders of classes or in tar files."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_attn.data.sets import digest

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
