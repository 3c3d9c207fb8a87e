"""Samples of tar files in the layout of WebDataset: an image KEY.png beside its class KEY.cls.

Images are read at random places, because a resumed cell continues within an epoch. So this module
lists the places of all images; the package `webdataset` reads a file from its beginning.
"""

import re
import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path, PurePosixPath

from lit_attn.data.pictures import ENDINGS
from lit_attn.schema.errors import ConfigError

FIRST_KINDS = ("jpg", "jpeg", "png")
KINDS = (*FIRST_KINDS, *sorted({ending[1:] for ending in ENDINGS} - set(FIRST_KINDS)))
"""Endings of images in tar files, without dots. The first one of a sample is its image."""

COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstd"}
"""Programs that compress files, by the first bytes of such a file."""


def read_shard(path: Path, classes: int) -> Iterator[tuple[str, int]]:
    """Yield (name, label) of every image of a tar file; a name is "file offset size".

    Hidden members, and members without an ending, are no samples. Raises ConfigError for a torn or
    compressed file, for a sample without an image or a class, and for a key that occurs twice.
    """
    try:
        _require_no_compression(path)
        with tarfile.open(path, "r:") as archive:
            keys: set[str] = set()
            for key, parts in groupby(_list_parts(archive), _sample_key):
                if key in keys:
                    raise ValueError(
                        f"sample '{key}' occurs twice; write the files of a sample one after "
                        "another, and each sample with a key of its own"
                    )
                keys.add(key)
                image, label = _read_sample(archive, key, list(parts), classes)
                yield f"{path.name} {image.offset_data} {image.size}", label
            _require_end(archive, path)
    except (OSError, ValueError, tarfile.TarError) as error:
        raise ConfigError(f"data.path: {path}: {error}") from error


def _require_no_compression(path: Path) -> None:
    """Raise ValueError for a compressed file, in which an image has no place of its own."""
    with path.open("rb") as file:
        start = file.read(8)
    for mark, program in COMPRESSIONS.items():
        if start.startswith(mark):
            raise ValueError(f"it is compressed by {program}; decompress it")


def _list_parts(archive: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """Yield the name and the content of every file that belongs to a sample.

    Raises ValueError for a link whose content is not in the archive before it.
    """
    contents: dict[str, tarfile.TarInfo] = {}
    for member in archive:
        content = member
        if member.islnk() and member.linkname in contents:
            # GNU tar stores a file with several names once.
            content = contents[member.linkname]
        elif member.islnk() or member.issym():
            raise ValueError(
                f"'{member.name}' is a link to '{member.linkname}'; write the file with "
                "`tar --dereference --hard-dereference`"
            )
        if not content.isfile():
            continue
        contents[member.name] = content
        path = PurePosixPath(member.name)
        is_hidden = any(part.startswith(".") for part in path.parts)
        if not is_hidden and "." in path.name:
            yield member.name, content


def _sample_key(part: tuple[str, tarfile.TarInfo]) -> str:
    """Return the name of a member up to the first dot of its last part."""
    name, _ = part
    return re.sub(r"\.[^/]*$", "", name)


def _read_sample(
    archive: tarfile.TarFile, key: str, parts: list[tuple[str, tarfile.TarInfo]], classes: int
) -> tuple[tarfile.TarInfo, int]:
    """Return the image and the class of a sample; raise ValueError if one is missing or double."""
    by_kind: dict[str, tarfile.TarInfo] = {}
    for name, content in parts:
        kind = name[len(key) + 1 :].lower()
        if kind in by_kind:
            raise ValueError(f"sample '{key}' has two members '{name}'; give each sample a key")
        by_kind[kind] = content
    images = [by_kind[kind] for kind in KINDS if kind in by_kind]
    file = archive.extractfile(by_kind["cls"]) if "cls" in by_kind else None
    written = "" if file is None else file.read().decode(errors="replace").strip()
    is_class = re.fullmatch(r"[0-9]{1,9}", written) is not None and int(written) < classes
    if not images or not is_class:
        instead = f", not '{written[:20]}'" if written else ""
        raise ValueError(
            f"sample '{key}' needs an image ({', '.join(f'.{kind}' for kind in KINDS)}) "
            f"and a class (.cls) from 0 to {classes - 1}{instead}"
        )
    return images[0], int(written)


def _require_end(archive: tarfile.TarFile, path: Path) -> None:
    """Raise ValueError unless zeros alone follow the last member, at least a block of them."""
    with path.open("rb") as file:
        file.seek(archive.offset)
        block = file.read(tarfile.BLOCKSIZE)
        if block != bytes(tarfile.BLOCKSIZE):
            raise ValueError("it has no end of the archive, so it is torn; copy or write it again")
        while block:
            if block.strip(b"\0"):
                raise ValueError(
                    "a second archive follows the end of the first one; join tar files with "
                    "`tar --concatenate`, or keep them apart"
                )
            block = file.read(tarfile.RECORDSIZE)
