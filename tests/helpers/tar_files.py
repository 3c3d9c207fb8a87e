"""Tar files and small pictures for the tests of readers."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image


def make_picture(value: int = 1, side: int = 8) -> bytes:
    """Return a grey PNG of `side` x `side` pixels of one value."""
    content = io.BytesIO()
    Image.fromarray(np.full((side, side), value, np.uint8)).save(content, "PNG")
    return content.getvalue()


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write members in their order; a content that begins with `->` is a hard link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if content.startswith(b"->"):
                member.type = tarfile.LNKTYPE
                member.linkname = content[2:].decode()
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
