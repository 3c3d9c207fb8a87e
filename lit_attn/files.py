"""Reading and writing of files: after a crash the old or the new file exists, never half of one."""

import contextlib
import fcntl
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_attn.schema.errors import ConfigError


def read_text(path: Path, newline: str | None = None) -> str:
    """Return the text of a UTF-8 file, without a byte-order mark at its start.

    Every line ends with a line feed, unless `newline` is "" (see `open`). Raises ConfigError if the
    file cannot be read or is not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: not UTF-8 text (byte {error.start:,}); save the file as UTF-8"
        ) from error
    if newline == "" or "\r" not in text:
        return text
    return text.replace("\r\n", "\n").replace("\r", "\n")


def open_at_once(path: Path, flags: int = 0) -> io.FileIO:
    """Open a file for reading. A FIFO is empty: waiting for its writer could take for ever."""

    def open_without_waiting(name: str, mode: int) -> int:
        return os.open(name, mode | flags | os.O_NONBLOCK)

    return io.FileIO(path, opener=open_without_waiting)


def write_atomic(path: Path, content: str | bytes, *, fsync: bool = True) -> None:
    """Write `content` to `path` through a temporary file, fsync and rename.

    The temporary file lies beside `path`, so the rename stays within one file system. The folder is
    fsynced too, so the name points at the new content after a power cut.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            if fsync:
                os.fsync(stream.fileno())
        # mkstemp makes files private. A record is readable by everybody who can read the folder.
        Path(temporary).chmod(0o666 & ~_read_umask())
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)
        raise
    if fsync:
        _fsync_folder(path.parent)


def _read_umask() -> int:
    """Return the permissions that new files of this process do not get."""
    # The system can only set it, and then returns the value before.
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _fsync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_folder(path: Path) -> None:
    """Raise ConfigError if `path` is not a folder, with what is there instead."""
    if not path.exists():
        raise ConfigError(f"{path}: this folder does not exist; correct the path, or run a study")
    if not path.is_dir():
        raise ConfigError(f"{path}: is a file; write the folder of the runs")


def require_writable(folder: Path, option: str) -> None:
    """Raise ConfigError if no file can be written to `folder`; the message names `option`.

    A folder that does not exist is tried in a hidden folder of the nearest one that does. It is not
    created itself: another process may use it.
    """
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".lit_attn.") as trial:
            # A name can be too long.
            tried = Path(trial, folder.relative_to(existing))
            tried.mkdir(parents=True, exist_ok=True)
            (tried / "file").touch()
    except OSError as error:
        reason = f"cannot be written: {error.strerror}"
        if isinstance(error, FileNotFoundError):  # A link to nothing.
            reason = "is not a folder"
        raise ConfigError(f"{option} {folder}: {reason}") from error


def append(path: Path, content: str) -> None:
    """Append `content` to a file and fsync; a crash may cut the last line."""
    with path.open("a", encoding="utf-8", newline="") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_json(path: Path, value: Any) -> None:
    """Write `value` atomically as indented JSON with sorted keys.

    Raises ValueError for NaN and infinity.
    """
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
    write_atomic(path, text + "\n")


@contextlib.contextmanager
def one_at_a_time(folder: Path, name: str) -> Iterator[None]:
    """Wait for the lock `.<name>.lock` in `folder` and hold it.

    The kernel releases the lock of a process that ends. A read-only folder needs no lock.
    """
    descriptor = None
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
