"""Temporary folders that a killed process leaves behind only until the next process needs one."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "lit_attn-temporary-"
NEW = f".{PREFIX}"
"""Beginning of a folder's name until it is locked."""


@contextlib.contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder in `parent`, or in TMPDIR, and remove it afterwards.

    While its process or one that was forked from it lives, the folder is locked. The folders
    without a lock, whose processes were killed, are removed first. Unlike a pid, a lock is also
    seen by other containers.
    """
    owner = os.getpid()
    parent = parent or Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    new = Path(tempfile.mkdtemp(prefix=NEW, dir=parent))
    descriptor = os.open(new, os.O_RDONLY)
    folder = new
    try:
        # A file system without locks keeps its abandoned folders.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            folder = new.rename(new.with_name(new.name.removeprefix(".")))
        yield folder
    finally:
        # A forked process that drops this context must not remove the folder.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders in `parent` that no process has locked."""
    for folder in parent.glob(f"{PREFIX}*"):
        # Folders of other users cannot be opened, and those in use cannot be locked.
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
