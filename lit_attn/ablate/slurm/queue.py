"""SLURM jobs of the cells, found by their names.

A batch is a job array of cells of one study. Its folder `<study>/.slurm/<token>/` lists the cells
before the array is submitted, and the array is named after the token. A later command on any
terminal asks `squeue` for jobs of that name and so finds the job of every cell.
"""

import contextlib
import getpass
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from lit_attn.ablate.plan import Matrix
from lit_attn.cells.records import FailureClass, Record
from lit_attn.schema.errors import ConfigError

NAME = "lit_attn-"
# States in squeue of jobs that wait and of jobs that run.
PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
PENDING |= {"RESV_DEL_HOLD"}
RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
ENDS: dict[str, FailureClass] = {
    "TIMEOUT": "timed-out",
    "DEADLINE": "timed-out",
    "OUT_OF_MEMORY": "out-of-memory",
    "CANCELLED": "killed",
    "PREEMPTED": "killed",
    "NODE_FAIL": "killed",
    "BOOT_FAIL": "killed",
    "REVOKED": "killed",
}
"""Failure classes of the states that name the reason of a job's end."""


class BatchCell(Record):
    """A cell of an array: its folder below the study's, and its attempts before the submission."""

    folder: str
    attempts: int


class Batch(Record):
    """Cells of a job array, in the order of their indices."""

    cells: list[BatchCell]


class Task(NamedTuple):
    """Job of a cell: its id such as `123_4`, its state in squeue, its batch's folder, its cell."""

    id: str
    state: str
    batch: Path
    cell: BatchCell

    @property
    def is_running(self) -> bool:
        return self.state in RUNNING

    @property
    def is_over(self) -> bool:
        return self.state not in PENDING | RUNNING

    @property
    def rank(self) -> tuple[bool, int]:
        """Sorting key of the jobs of a cell: the largest is the active job, or else the newest."""
        return not self.is_over, int(self.id.split("_")[0])

    def last_line(self) -> str:
        """Return the last line of the job's own error output, which is not the cell's log."""
        lines = []
        for path in sorted(self.batch.glob(f"{self.id}_*_log.err")):
            lines += path.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def find_tasks(matrices: Iterable[Matrix]) -> dict[Path, Task]:
    """Return the job of every cell that SLURM still knows, by the cell's folder.

    Raises OSError if SLURM does not answer.
    """
    batches: dict[str, tuple[Path, Path, list[BatchCell]]] = {}
    for matrix in matrices:
        for path in (matrix.folder / ".slurm").glob("*/batch.json"):
            with contextlib.suppress(ValidationError):
                cells = Batch.model_validate_json(path.read_bytes()).cells
                batches[NAME + path.parent.name] = (matrix.folder, path.parent, cells)
    tasks: dict[Path, Task] = {}
    for name, index, task_id, state in _list_jobs() if batches else ():
        if name not in batches:
            continue
        study, batch, cells = batches[name]
        task = Task(task_id, state, batch, cells[index])
        folder = study / task.cell.folder
        if folder not in tasks or tasks[folder].rank < task.rank:
            tasks[folder] = task
    return tasks


def cancel(matrices: Iterable[Matrix]) -> int:
    """Cancel the active jobs, whose cells write a checkpoint and end. Return their number.

    Raises ConfigError if SLURM does not answer.
    """
    try:
        ids = [task.id for task in find_tasks(matrices).values() if not task.is_over]
        if ids:
            _run("scancel", *ids)
    except OSError as error:
        raise ConfigError(f"--cancel: {error}") from error
    return len(ids)


def _list_jobs() -> Iterator[tuple[str, int, str, str]]:
    """Yield name, array index, id and state of every job of this user that SLURM knows.

    SLURM forgets a job some minutes after its end (MinJobAge).
    """
    columns = "--format=%K|%i|%T|%j"
    user = f"--user={getpass.getuser()}"
    output = _run("squeue", "--noheader", "--array", "--states=all", user, columns)
    for line in output.splitlines():
        if line.count("|") < 3:
            continue
        index, task_id, state, name = line.split("|", 3)
        yield name, int(index) if index.isdecimal() else 0, task_id, state


def _run(*command: str) -> str:
    """Return the output of a SLURM command.

    Raises OSError if the command fails, and ConfigError if it does not exist.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError as error:
        raise ConfigError(f"--launcher slurm: command '{command[0]}' not found") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} does not answer") from error
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
