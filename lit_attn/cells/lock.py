"""One process per cell, whoever started it: the file `lock` in the cell's folder.

The lock names its holder (host, boot, pid, start time of the process) and its modification time is
a heartbeat. A lock whose process is gone is taken over: on the same host that is known from the
process table, for another host from a heartbeat that has stopped.

A holder may have a keeper, the runner that started it. Then the lock outlasts it until the runner
has recorded how it ended: between the two the cell would seem cut off without a word, and another
runner would try it again.
"""

import contextlib
import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ValidationError

HEARTBEAT = 10.0
"""Seconds between two heartbeats."""
STALE_AFTER = 600.0
"""Seconds without a heartbeat after which a holder on another host is taken for dead."""


class CellLocked(Exception):
    """Another live process holds the cell."""


class ProcessIdentity(BaseModel):
    """A process. A pid alone could be another one's by now; its start time tells."""

    host: str
    boot: str
    pid: int
    started: str | None

    def is_alive(self, heartbeat: float) -> bool:
        """Whether it still runs; `heartbeat` is the time of its last sign of life."""
        if self.host != socket.gethostname():
            return time.time() - heartbeat < STALE_AFTER
        return self.boot == _boot() and self.started == _started(self.pid)


class LockHolder(ProcessIdentity):
    """The process that holds a lock, and the one that will release it in its place."""

    keeper: ProcessIdentity | None = None

    def is_alive(self, heartbeat: float) -> bool:
        """Whether either of the two still runs."""
        kept = self.keeper is not None and self.keeper.is_alive(heartbeat)
        return kept or super().is_alive(heartbeat)


def current_process() -> ProcessIdentity:
    """The one that asks."""
    pid = os.getpid()
    return ProcessIdentity(host=socket.gethostname(), boot=_boot(), pid=pid, started=_started(pid))


def read_holder(folder: Path) -> LockHolder | None:
    """The live holder of a cell's lock, or None."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _live(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def hold_lock(folder: Path, keeper: ProcessIdentity | None = None) -> Iterator[None]:
    """Hold the cell's lock; raises Held where another live process does.

    With a `keeper` the lock stays, and is that one's to `release`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    me = LockHolder(**current_process().model_dump(), keeper=keeper)
    while not _create(path, me.model_dump_json()):
        if read_holder(folder):
            raise CellLocked(str(path))
        _remove_stale(path)
    mine = path.stat().st_ino
    done = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, done), daemon=True)
    beat.start()
    try:
        yield
    finally:
        done.set()
        beat.join()
        if keeper is None:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == mine:
                    path.unlink()


def release_lock(folder: Path) -> None:
    """Remove the lock of a cell that has ended, where this process is its keeper."""
    found = read_holder(folder)
    if found is not None and found.keeper == current_process():
        # A disk that is away keeps it until this process ends, and ends nothing itself.
        with contextlib.suppress(OSError):
            (folder / "lock").unlink()


def _create(path: Path, content: str) -> bool:
    """Whether the lock could be made. It appears whole: written aside, then linked to its name."""
    aside = path.with_name(f".lock.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        aside.write_text(content)
        os.link(aside, path)
    except FileExistsError:
        return False
    finally:
        aside.unlink(missing_ok=True)
    return True


def _remove_stale(path: Path) -> None:
    """Remove a dead holder's lock, unless somebody else has already replaced it.

    Two processes may find the same stale lock. Under a lock on its inode, it is removed only while
    it is still the file of that name and still stale.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            same = os.fstat(descriptor).st_ino == path.stat().st_ino
            if same and _live(descriptor) is None:
                path.unlink()
    finally:
        os.close(descriptor)


def _live(descriptor: int) -> LockHolder | None:
    """The holder that an open lock file names, where it is alive."""
    try:
        found = LockHolder.model_validate_json(os.pread(descriptor, 4096, 0))
    except ValidationError:
        return None
    return found if found.is_alive(os.fstat(descriptor).st_mtime) else None


def _beat(path: Path, done: threading.Event) -> None:
    while not done.wait(HEARTBEAT):
        # A network disk that is away for a moment must not end the heartbeat for good.
        with contextlib.suppress(OSError):
            os.utime(path)


def _boot() -> str:
    """This boot of this machine: a pid means nothing across a restart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process started, in ticks since boot; None where there is no such process.

    Without /proc the process's existence has to do.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        return "unknown"
    # Field 22 of the line; a zombie (Z) has ended and only waits to be collected.
    return None if fields[0] == "Z" else fields[19]
