"""What a cell's folder says has become of the cell."""

import json
import shlex
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from lit_attn.cells.lock import read_holder
from lit_attn.cells.records import Exit, FailureClass, Result

FINAL_FAILURES: set[FailureClass] = {"diverged", "bad-configuration", "error"}
"""What another runner that shares the matrix has found so while this one ran is not run again."""

State = Literal["done", "running", "missing", "interrupted"] | FailureClass


class Progress(NamedTuple):
    """Optimiser steps done, and in all; seconds of a step, and the most bytes held on a device."""

    step: int
    total: int
    step_time: float | None = None
    memory: int | None = None


def read_state(folder: Path, identity: str) -> State:
    """Its result, a live holder, the last attempt's failure, or that it was never begun, or begun
    and cut off without a word."""
    if read_result(folder, identity) is not None:
        return "done"
    if read_holder(folder) is not None:
        return "running"
    if not (begun := list_attempts(folder)):
        return "missing"
    ended = read_exit(begun[-1])
    return "interrupted" if ended is None else ended.failure


def read_result(folder: Path, identity: str) -> Result | None:
    """The cell's result, where there is a whole one of this very cell."""
    try:
        found = Result.model_validate_json((folder / "result.json").read_bytes())
    except (OSError, ValidationError):
        return None
    return found if found.identity == identity else None


def list_attempts(folder: Path) -> list[Path]:
    """The folders of a cell's attempts, oldest first."""
    found = (path for path in (folder / "attempts").glob("*") if path.name.isdecimal())
    return sorted(found, key=lambda path: int(path.name))


def create_attempt(folder: Path) -> Path:
    """A folder for one more attempt."""
    before = list_attempts(folder)
    path = folder / "attempts" / str(int(before[-1].name) + 1 if before else 1)
    path.mkdir(parents=True)
    return path


def read_exit(attempt: Path) -> Exit | None:
    """How an attempt ended, where that was recorded."""
    try:
        return Exit.model_validate_json((attempt / "exit.json").read_bytes())
    except (OSError, ValidationError):
        return None


def final_failure_since(folder: Path, known: int) -> Exit | None:
    """How the last attempt has failed, where it would again and is not one of the `known` first."""
    begun = list_attempts(folder)[known:]
    ended = read_exit(begun[-1]) if begun else None
    return ended if ended is not None and ended.failure in FINAL_FAILURES else None


def log_name(rank: int) -> str:
    """The log of a rank in its attempt's folder."""
    return f"log.rank{rank}.txt" if rank else "log.txt"


def read_log_tail(attempt: Path, rank: int = 0, size: int = 16384) -> str:
    """The end of a rank's log, whatever bytes are in it."""
    try:
        with (attempt / log_name(rank)).open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - size))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def read_progress(folder: Path) -> Progress | None:
    """How far a running cell is, where it has said so."""
    try:
        said = json.loads((folder / "progress.json").read_bytes())
        step_time, memory = said.get("step_time"), said.get("memory")
        return Progress(
            int(said["step"]),
            int(said["total"]),
            None if step_time is None else float(step_time),
            None if memory is None else int(memory),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def progress_mtime(folder: Path) -> int:
    """When a cell last told of its progress, by its disk's clock in nanoseconds; 0 if never."""
    try:
        return (folder / "progress.json").stat().st_mtime_ns
    except OSError:
        return 0


def rerun_command(folder: Path, smoke: bool = False) -> str:
    """The command that runs a cell by itself, where it can be watched."""
    return f"python -m lit_attn.train {shlex.quote(str(folder))}{' --smoke' if smoke else ''}"
