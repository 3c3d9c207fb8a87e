"""The lock of a cell: at most one process trains it, on any machine that shares the disk.

The file `lock` in the cell's folder names its holder, and the holder changes the file's
modification time every HEARTBEAT seconds. A process of this boot of this machine and this PID
namespace is looked up in the process table. Every other holder (another machine, which may have the
same host name, another container, this machine before a restart) is dead once its heartbeat was
watched for STALE_AFTER seconds without a change. Clocks are never compared.

A holder may have a keeper: the runner that started it, which removes the lock once it has recorded
how the cell ended.
"""

import contextlib
import errno
import fcntl
import io
import os
import secrets
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from lit_attn.files import open_at_once, require_writable
from lit_attn.schema.errors import ConfigError

HEARTBEAT = 10.0  # Seconds between two heartbeats.
STALE_AFTER = 600.0  # Seconds without a heartbeat until a holder on another machine is dead.
BUSY = 75  # Exit code of a cell that another process holds (EX_TEMPFAIL of sysexits.h).


class CellLocked(Exception):
    """Another live process holds the cell's lock."""


class LockError(ConfigError):
    """The lock cannot be used: it belongs to another user, or the file system has no locks."""


class ProcessIdentity(BaseModel):
    """Identity of a process.

    Pids are only comparable within one boot of one machine (`boot`) and one PID namespace. A pid
    may be reused: `started` tells two processes with the same pid apart.
    """

    host: str
    boot: str
    namespace: str = ""
    pid: int
    started: str | None

    def is_alive(self) -> bool | None:
        """Return True if the process runs, False if not, and None if it cannot be looked up."""
        reader = current_process()
        if not reader.namespace:
            return None
        is_comparable = (
            self.host == reader.host
            and self.boot == reader.boot
            and self.namespace == reader.namespace
        )
        if not is_comparable:
            return None
        return self.started == _start_time(self.pid)


class LockHolder(ProcessIdentity):
    """The process that holds a lock, and the runner that will release it."""

    keeper: ProcessIdentity | None = None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else "a process of another user"

    def is_alive(self) -> bool | None:
        """Return True if the holder or its keeper runs, None if one of them cannot be looked up."""
        states = [super().is_alive()]
        if self.keeper is not None:
            states.append(self.keeper.is_alive())
        if True in states:
            return True
        if None in states:
            return None
        return False


def current_process() -> ProcessIdentity:
    """Return the identity of this process."""
    pid = os.getpid()
    boot = ""
    namespace = ""
    # Without /proc (macOS) processes cannot be looked up.
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return ProcessIdentity(
        host=socket.gethostname(),
        boot=boot,
        namespace=namespace,
        pid=pid,
        started=_start_time(pid),
    )


def read_holder(folder: Path) -> LockHolder | None:
    """Return the holder of a cell's lock, or None if there is no lock or the holder is dead.

    A holder that cannot be looked up counts as alive until this process has watched its heartbeat
    for STALE_AFTER seconds: call this function repeatedly.
    """
    path = folder / "lock"
    try:
        with open_at_once(path, os.O_NOFOLLOW) as file:
            return _live_holder(path, file)
    except PermissionError:
        with contextlib.suppress(OSError):
            if not _has_stopped(path, path.stat()):
                return LockHolder(host="", boot="", pid=0, started=None)
    except OSError:
        pass
    return None


@contextlib.contextmanager
def hold_lock(
    folder: Path, keeper: ProcessIdentity | None = None, *, is_beating: bool = True
) -> Iterator[Callable[[], None]]:
    """Hold the cell's lock, and yield the function that starts its heartbeat if not `is_beating`.

    With a `keeper` the lock file stays when the context ends, until the keeper calls
    `release_lock`. Waits for the next heartbeat of a holder that cannot be looked up. Raises
    CellLocked if another live process holds the lock, and LockError if no lock can be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    me = LockHolder(**current_process().model_dump(), keeper=keeper)
    content = me.model_dump_json()
    while not _create(path, content):
        holder = _wait_for_heartbeat(folder)
        if holder is not None:
            raise CellLocked(f"{folder}: {holder} runs this cell")
        remove_stale(folder)
    inode = path.stat().st_ino
    done = threading.Event()
    thread = threading.Thread(target=_beat, args=(path, inode, content, done), daemon=True)
    if is_beating:
        thread.start()
    try:
        yield thread.start
    finally:
        done.set()
        if thread.ident is not None:
            thread.join()
        if keeper is None:
            with contextlib.suppress(FileNotFoundError):
                if _is_own(path, inode, content):
                    path.unlink()


def release_lock(folder: Path) -> None:
    """Remove the lock of a cell that has ended, if this process is its keeper."""
    # If the disk is not reachable, the lock stays until this process ends.
    path = folder / "lock"
    with contextlib.suppress(OSError, ValidationError), open_at_once(path, os.O_NOFOLLOW) as file:
        if LockHolder.model_validate_json(file.read()).keeper == current_process():
            path.unlink()


def remove_stale(folder: Path) -> None:
    """Remove a dead holder's lock, unless another process has already replaced it.

    Two processes may see the same stale lock. Each flocks the file, and removes it only if it still
    has the name `lock` and is still stale. Raises LockError if the lock cannot be removed.
    """
    path = folder / "lock"
    try:
        file = open_at_once(path, os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    except OSError as error:
        raise LockError(f"{path}: cannot be read: {error.strerror}. Delete it.") from error
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise LockError(f"{path}: is not a regular file. Delete it.")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            is_same = os.fstat(file.fileno()).st_ino == path.stat().st_ino
            if is_same and _live_holder(path, file) is None:
                path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise LockError(f"{path}: is stale and cannot be removed: {error.strerror}") from error


def require_locks(folder: Path) -> None:
    """Raise ConfigError, which names --out, if cells below `folder` cannot have locks.

    No file and no new folder remains. The reason is that nothing can be written, or that the file
    system has no flock or hard links.
    """
    require_writable(folder, "--out")
    # A folder that does not exist yet will be on the file system of the nearest one that does.
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".lock.") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.link(file.name, f"{file.name}.link")
            Path(f"{file.name}.link").unlink()
    except OSError as error:
        raise LockError(
            f"--out {folder}: its file system does not support the flock and hard links that "
            f"locks need: {error.strerror}. Choose a folder on another file system."
        ) from error


def _create(path: Path, content: str) -> bool:
    """Create the lock atomically, by a hard link to a complete file; return False if it exists."""
    # A killed process leaves this file. The next cell in the folder removes files of this name.
    temporary = path.with_name(f".lock.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        # On a full disk, the file may be created without its content.
        temporary.write_text(content)
        os.link(temporary, path)
    except FileExistsError:
        return False
    except FileNotFoundError:
        # The process that holds the lock has removed the temporary file. Without a folder, the next
        # attempt raises the same error when it writes the file.
        if not path.parent.exists():
            raise
        return False
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise LockError(f"{path}: cannot be created: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return True


def _wait_for_heartbeat(folder: Path) -> LockHolder | None:
    """Wait until it is known whether the holder is alive; return it if so."""
    beats: set[Heartbeat] = set()
    while True:
        holder = read_holder(folder)
        if holder is None or holder.is_alive() is not None:
            return holder
        if not beats:
            print(f"{folder}: waiting for a heartbeat of {holder}", file=sys.stderr)
        with contextlib.suppress(OSError):
            beats.add(_last_heartbeat((folder / "lock").stat()))
        if len(beats) > 1:
            return holder
        time.sleep(HEARTBEAT / 10)


def _live_holder(path: Path, file: io.FileIO) -> LockHolder | None:
    """Return the holder that an open lock file names, unless it is dead."""
    try:
        holder = LockHolder.model_validate_json(file.read())
    except (OSError, ValidationError):
        return None
    is_alive = holder.is_alive()
    if is_alive is None:
        is_alive = not _has_stopped(path, os.fstat(file.fileno()))
    return holder if is_alive else None


class Heartbeat(NamedTuple):
    """Number of a lock file's inode and its modification time, which a heartbeat changes."""

    inode: int
    modified: int


class Watch(NamedTuple):
    """Last heartbeat of a lock file, seconds without another one, and time of the last reading."""

    beat: Heartbeat
    silence: float
    time: float


_WATCHED: dict[Path, Watch] = {}
"""Lock files whose heartbeat this process watches."""


def _last_heartbeat(status: os.stat_result) -> Heartbeat:
    """Return the last heartbeat of the holder of a lock file."""
    return Heartbeat(status.st_ino, status.st_mtime_ns)


def _has_stopped(path: Path, status: os.stat_result) -> bool:
    """Return True if the lock file did not change during STALE_AFTER seconds of watching."""
    beat = _last_heartbeat(status)
    now = time.monotonic()
    last = _WATCHED.get(path)
    silence = 0.0
    if last is not None and last.beat == beat:
        # A gap between two calls counts as one heartbeat: both processes may have been frozen.
        silence = last.silence + min(now - last.time, HEARTBEAT)
    _WATCHED[path] = Watch(beat, silence, now)
    return silence > STALE_AFTER


def _is_own(path: Path, inode: int, content: str) -> bool:
    """Return True if the lock is the one that was created with this inode and content.

    The lock of another process may have the same inode, which is free again after a removal.
    """
    return path.stat().st_ino == inode and path.read_text() == content


def _beat(path: Path, inode: int, content: str, done: threading.Event) -> None:
    """Change the lock's modification time until `done`.

    Ends this process if another process has replaced the lock, for example after this process was
    frozen for longer than STALE_AFTER: two processes must not train one cell.
    """
    while not done.wait(HEARTBEAT):
        # An error of a network disk must not end the heartbeat.
        with contextlib.suppress(OSError):
            if not _is_own(path, inode, content):
                print(f"{path}: another process has taken this lock", file=sys.stderr, flush=True)
                os._exit(BUSY)
            os.utime(path)


def _start_time(pid: int) -> str | None:
    """Return a process's start in ticks since boot, or None if it does not run."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # Fields 1 and 2 of the line are the pid and the name of the program in parentheses.
    _, _, after_name = line.rpartition(")")
    fields_from_third = after_name.split()
    state = fields_from_third[0]
    start_time = fields_from_third[22 - 3]
    # A zombie (Z) has ended and only waits for its parent.
    return None if state == "Z" else start_time
