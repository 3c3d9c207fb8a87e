"""The jobs of cells, found by their names.

A batch is a job array of cells of one study. Its folder `<study>/.slurm/<token>/` lists the cells
before the array is submitted, and the array is called after the token. So whoever comes later, on
whatever terminal, asks `squeue` for the jobs of that name and knows the cell of each.
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
# squeue's states of a job that will run, runs, or ended in a way that says why.
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


class Place(Record):
    """A cell of an array: its folder below its study's, and the attempts made before."""

    folder: str
    attempts: int


class Batch(Record):
    """The cells of a job array, by their index in it."""

    cells: list[Place]


class Task(NamedTuple):
    """A cell's job: its id, as `123_4`, its state in squeue's words, its batch's folder.""" ""

    id: str
    state: str
    batch: Path
    place: Place

    @property
    def waits(self) -> bool:
        return self.state in PENDING

    @property
    def runs(self) -> bool:
        return self.state in RUNNING

    @property
    def is_over(self) -> bool:
        return not (self.waits or self.runs)

    def counts_less_than(self, other: "Task") -> bool:
        """Of a cell's jobs the one that is not over counts, or else the last."""
        mine, others = ((not task.is_over, int(task.id.split("_")[0])) for task in (self, other))
        return mine < others

    def last_words(self) -> str:
        """The last line of the job's own output, which is not the cell's log."""
        lines = []
        for path in sorted(self.batch.glob(f"{self.id}_*_log.err")):
            lines += path.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def find(matrices: Iterable[Matrix]) -> dict[Path, Task]:
    """The newest job of every cell that SLURM still knows, by the cell's folder.

    Raises OSError where SLURM does not answer.
    """
    batches: dict[str, tuple[Path, Path, list[Place]]] = {}
    for matrix in matrices:
        for path in (matrix.folder / ".slurm").glob("*/batch.json"):
            with contextlib.suppress(ValidationError):
                cells = Batch.model_validate_json(path.read_bytes()).cells
                batches[NAME + path.parent.name] = (matrix.folder, path.parent, cells)
    found: dict[Path, Task] = {}
    for name, index, task_id, state in _queue() if batches else ():
        if name not in batches:
            continue
        study, batch, cells = batches[name]
        task = Task(task_id, state, batch, cells[index])
        folder = study / task.place.folder
        if folder not in found or found[folder].counts_less_than(task):
            found[folder] = task
    return found


def cancel(matrices: Iterable[Matrix]) -> int:
    """Cancel the jobs that are not over: their cells save and end. How many that were.

    Raises ConfigError where SLURM does not answer.
    """
    try:
        ids = [task.id for task in find(matrices).values() if not task.is_over]
        if ids:
            _answer("scancel", *ids)
    except OSError as error:
        raise ConfigError(f"--cancel: {error}") from error
    return len(ids)


def _queue() -> Iterator[tuple[str, int, str, str]]:
    """Name, index in its array, id and state of every job of ours that SLURM knows.

    Those that are over it knows for some minutes (MinJobAge).
    """
    user = getpass.getuser()
    form = "--format=%K|%i|%T|%j"
    said = _answer("squeue", "--noheader", "--array", "--states=all", f"--user={user}", form)
    for line in said.splitlines():
        if line.count("|") < 3:
            continue
        index, task_id, state, name = line.split("|", 3)
        yield name, int(index) if index.isdecimal() else 0, task_id, state


def _answer(*command: str) -> str:
    """What a command of SLURM's says; OSError where it fails, ConfigError where it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError as error:
        raise ConfigError(f"--launcher slurm: there is no '{command[0]}' here") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} does not answer") from error
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
