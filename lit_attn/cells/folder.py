"""Reader of a cell's folder: its state, its attempts, their logs and its progress."""

import errno
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import FiniteFloat, NonNegativeInt, PositiveInt

from lit_attn.cells.lock import read_holder
from lit_attn.cells.records import Exit, FailureClass, Record, Result
from lit_attn.schema.errors import ConfigError, plural

FINAL_FAILURES: set[FailureClass] = {"diverged", "bad-configuration", "error"}
"""Failures after which a runner does not try a cell again if another runner met them meanwhile."""

State = Literal["done", "running", "unreadable", "missing", "interrupted"] | FailureClass
"""State of a cell.

- done: it has a result.
- running: a live process holds its lock.
- unreadable: its result.json is torn, or belongs to a cell with another identity.
- missing: no attempt was started.
- interrupted: the last attempt ended without a record of its end, or the user stopped the run.
- a failure class: how the last attempt failed.
"""


class Progress(Record):
    """Steps done and in total, and seconds per step."""

    step: NonNegativeInt
    total: PositiveInt
    step_time: FiniteFloat | None = None

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds of the remaining steps, or None before the first measurement."""
        return None if self.step_time is None else self.step_time * (self.total - self.step)


class CellStatus(NamedTuple):
    """Status of a cell with the end of its last attempt; a done cell has only a result."""

    state: State
    result: Result | None = None
    attempt: Path | None = None
    exit: Exit | None = None
    progress: Progress | None = None


def read_cell(folder: Path, identity: str) -> CellStatus:
    """Read the status of the cell with this `identity`."""
    # First, so that status and dry run of many finished cells read one file of each.
    result = read_result(folder, identity)
    if result is not None:
        return CellStatus("done", result)
    attempts = list_attempts(folder)
    attempt = attempts[-1] if attempts else None
    last_exit = read_exit(attempt) if attempt is not None else None
    if read_holder(folder) is not None:
        state: State = "running"
    elif (folder / "result.json").exists():
        state = "unreadable"
    elif attempt is None:
        return CellStatus("missing")
    elif last_exit is None or last_exit.is_stopped:
        state = "interrupted"
    else:
        state = last_exit.failure
    return CellStatus(state, None, attempt, last_exit, read_progress(folder))


def count_states(states: Iterable[State]) -> str:
    """Return `15 cells: 12 done, 3 missing`, in the order in which the states occur."""
    counts = Counter(states)
    parts = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f"{plural(counts.total(), 'cell')}: {parts}"


def read_result(folder: Path, identity: str) -> Result | None:
    """Return the result of the cell, or None if there is no readable one with this `identity`."""
    result = Result.read_valid(folder / "result.json")
    if result is None or result.identity != identity:
        return None
    return result


def set_aside(path: Path) -> Path:
    """Rename a file that cannot be used to a new name that ends in .unreadable, and return it."""
    target = path.with_name(f"{path.name}.unreadable")
    count = 1
    while target.exists():
        count += 1
        target = path.with_name(f"{path.name}.{count}.unreadable")
    return path.rename(target)


def require_no_links(folder: Path) -> None:
    """Raise ConfigError if a cell's folder, where files are deleted, contains a symbolic link."""
    for root, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(root, name)
            if path.is_symlink():
                raise ConfigError(f"{path}: is a symbolic link to {path.readlink()}. Delete it.")


def list_attempts(folder: Path) -> list[Path]:
    """Return the folders of a cell's attempts, oldest first."""
    try:
        paths = [path for path in (folder / "attempts").iterdir() if path.name.isdecimal()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    return sorted(paths, key=lambda path: int(path.name))


def create_attempt(folder: Path) -> Path:
    """Create and return the folder of one more attempt."""
    previous = list_attempts(folder)
    number = int(previous[-1].name) + 1 if previous else 1
    path = folder / "attempts" / str(number)
    if path.parent.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link; delete it", str(path.parent))
    path.mkdir(parents=True)
    return path


def read_exit(attempt: Path) -> Exit | None:
    """Return how an attempt ended, or None if that was not recorded."""
    return Exit.read_valid(attempt / "exit.json")


def final_failure_since(folder: Path, attempt_count: int) -> Exit | None:
    """Return the last failure after `attempt_count` attempts, if the cell would fail again."""
    new_attempts = list_attempts(folder)[attempt_count:]
    if not new_attempts:
        return None
    last_exit = read_exit(new_attempts[-1])
    if last_exit is None or last_exit.failure not in FINAL_FAILURES:
        return None
    return last_exit


def log_name(rank: int) -> str:
    """Return the name of a rank's log in the folder of an attempt."""
    return f"log.rank{rank}.txt" if rank else "log.txt"


def read_log_tail(attempt: Path, rank: int = 0, size: int = 16384) -> str:
    """Return the last `size` bytes of a rank's log as text, also if they are not UTF-8."""
    try:
        with (attempt / log_name(rank)).open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - size))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def read_progress(folder: Path) -> Progress | None:
    """Return the progress of a cell, or None if it has not written any."""
    return Progress.read_valid(folder / "progress.json")


def progress_mtime(folder: Path) -> int:
    """Return when a cell last wrote its progress (nanoseconds of its disk's clock), or 0."""
    try:
        return (folder / "progress.json").stat().st_mtime_ns
    except OSError:
        return 0
