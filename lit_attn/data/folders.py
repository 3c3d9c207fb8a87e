"""Reading of folders: files with certain endings, and a count of the files that are left out.

Hidden files and folders, whose names begin with a dot, are ignored.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from lit_attn.data.log import LOG
from lit_attn.data.pictures import ENDINGS
from lit_attn.schema.errors import ConfigError, plural

Content = TypeVar("Content")

UNFINISHED = (
    ".aria2",
    ".crdownload",
    ".download",
    ".incomplete",
    ".opdownload",
    ".part",
    ".partial",
    ".tmp",
)
"""Endings of files that browsers and other programs have not finished."""

MOST_NAMES = 5  # Names of one kind that a message lists.


class Scan(NamedTuple):
    """Files and folders directly in a folder, by name."""

    files: list[Path]
    folders: list[Path]


class FolderReader:
    """Reader of folders that counts the files that it leaves out.

    `key` is the configuration key with which errors begin, as `data.path`. Files are read if their
    names end in one of `endings`, in capitals or not.
    """

    def __init__(self, key: str, endings: Collection[str] = ENDINGS) -> None:
        self.key = key
        self.endings = endings
        self.left_out: Counter[str] = Counter()
        self.folders_left_out = 0

    def list_files(self, folder: Path) -> list[Path]:
        """Return the files that are read directly in `folder`; count its folders as left out.

        Raises ConfigError as `scan`.
        """
        content = self.scan(folder)
        self.folders_left_out += len(content.folders)
        return content.files

    def scan(self, folder: Path) -> Scan:
        """Return the files that are read and the folders in `folder`; count the other files.

        Raises ConfigError for a folder that cannot be read, for a name that is not UTF-8, for a
        link to a missing file, and for a folder with the ending of a file.
        """
        content = Scan([], [])
        for entry in list_visible(self.key, folder):
            ending = Path(entry.name).suffix.lower()
            # An entry knows its kind. Asking the disk would take minutes for a million files.
            if entry.is_dir():
                if ending in self.endings:
                    raise ConfigError(
                        f"{self.key}: {entry.path} is a folder with the ending of a file; rename it"
                    )
                content.folders.append(Path(entry.path))
            elif ending not in self.endings:
                self.left_out[ending or "no ending"] += 1
            elif entry.is_file():
                content.files.append(Path(entry.path))
            else:
                raise ConfigError(
                    f"{self.key}: {entry.path} is no file, or a link to a missing file; "
                    "restore the file or delete the link"
                )
        return content

    def walk(self, folder: Path, parents: tuple[Path, ...] = ()) -> Iterator[Path]:
        """Yield the files at every depth below `folder`.

        Raises ConfigError as `scan`, and for a link that leads back to one of `parents`.
        """
        resolved = folder.resolve()
        if resolved in parents:
            raise ConfigError(
                f"{self.key}: {folder} is a link to a folder that contains it; delete the link"
            )
        content = self.scan(folder)
        yield from content.files
        for inner in content.folders:
            yield from self.walk(inner, (*parents, resolved))

    def warn_of_left_out(self, root: Path) -> None:
        """Warn once about all files and folders that were left out, if there are any."""
        if self.left_out:
            counts = [f"{ending} ({count:,})" for ending, count in sorted(self.left_out.items())]
            LOG.warning(
                f"{self.key}: {root}: left out {plural(self.left_out.total(), 'file')}: "
                f"{', '.join(counts)}; files that are read end in "
                f"{', '.join(sorted(self.endings))}"
            )
        if self.folders_left_out:
            LOG.warning(
                f"{self.key}: {root}: left out {plural(self.folders_left_out, 'folder')}; "
                "only files directly in a split's folder are read"
            )


def list_visible(key: str, folder: Path) -> list[os.DirEntry[str]]:
    """Return the visible entries of `folder` by name.

    Every reader lists folders by this function. Raises ConfigError, which begins with `key`, for a
    folder that cannot be read and for a name that is not UTF-8.
    """
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise ConfigError(
            f"{key}: {folder} cannot be read: {error.strerror}; correct its permissions or the link"
        ) from error
    for entry in visible:
        try:
            entry.name.encode()
        except UnicodeEncodeError as error:
            # The records of a result are UTF-8 and contain names of files.
            raise ConfigError(
                f"{key}: {entry.path} has a name that is not UTF-8; rename it"
            ) from error
    return sorted(visible, key=lambda entry: entry.name)


def require_finished(key: str, path: Path) -> None:
    """Raise ConfigError for the name of an unfinished download or copy."""
    if path.suffix.lower() in UNFINISHED:
        raise ConfigError(f"{key}: {path} is an unfinished download; finish or delete it")


def natural_order(name: str) -> tuple[list[str | int], str]:
    """Return a sorting key by which `image10` follows `image9`, whatever the case of letters."""
    parts: list[str | int] = list(re.split(r"(\d+)", name.lower()))
    # Text and numbers alternate.
    for place in range(1, len(parts), 2):
        parts[place] = int(parts[place])
    return parts, name


def require_splits(splits: dict[str, Content], path: Path, content: str) -> dict[str, Content]:
    """Return "train", "test" and, if it exists, "val".

    A single evaluated split is "test", whether its folder is test or val. Raises ConfigError, which
    names `content`, if there is nothing to train on or to evaluate.
    """
    named = dict(splits)
    if "test" not in named and "val" in named:
        named["test"] = named.pop("val")
    if "train" not in named:
        raise ConfigError(f"data.path: no {content} in {path / 'train'}")
    if "test" not in named:
        raise ConfigError(f"data.path: no {content} in {path / 'test'} or {path / 'val'}")
    return named


def list_names(names: list[str]) -> str:
    """Return the first few of `names` for a message, and the number of the others."""
    shown = ", ".join(names[:MOST_NAMES])
    others = len(names) - MOST_NAMES
    return f"{shown} and {others} more" if others > 0 else shown
