"""Jobs of cells in SLURM's queue: search, reasons for which they wait, and cancellation.

A batch is a job array of cells of one study. Its folder `<study>/.slurm/<token>/` lists the cells
before the array is submitted, and the array is named after the token. A later command on any
terminal asks `squeue` for jobs of that name and so finds the job of every cell. The jobs do not
depend on the command that follows them.
"""

import contextlib
import getpass
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import TypeAdapter, ValidationError

from lit_attn.ablate.slurm.commands import TIMEOUT, run_command
from lit_attn.cells.records import FailureClass
from lit_attn.schema.errors import ConfigError, plural

if TYPE_CHECKING:
    from lit_attn.ablate.plan import Matrix

NAME = "lit_attn-"
KILLED = {"CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED"}
ENDS: dict[str, FailureClass] = dict.fromkeys(KILLED, "killed")
ENDS |= {"TIMEOUT": "timed-out", "DEADLINE": "timed-out", "OUT_OF_MEMORY": "out-of-memory"}
"""Failure classes of the states in squeue that name the reason of a job's end."""
BATCH = TypeAdapter(list[tuple[str, int]])
"""Cells of a job array by index: folder below the study's, attempts before the submission."""
OVER = {*ENDS, "COMPLETED", "FAILED"}
"""States of jobs that have ended. Jobs in all other states wait or run."""
STATUS_TIMEOUT = 5.0  # Seconds that the command `status` waits for squeue.

HINTS = {
    "AssocGrpCPUMinutesLimit": "the account has used its CPU time",
    "AssocGrp": "the jobs of the account have reached a limit; wait for others to end",
    "AssocMax": "the job exceeds a limit of the account",
    "BadConstraints": "no node has what slurm.constraint, slurm.mem and slurm.gpus ask for",
    "DependencyNeverSatisfied": "the job that it waits for has failed; cancel it with --cancel",
    "InvalidQOS": "the account has no such QOS; set slurm.sbatch",
    "JobHeldAdmin": "an administrator holds the job",
    "JobHoldMaxRequeue": "it was queued again too often; `scontrol release` tries again",
    "JobHeldUser": "`scontrol release` continues the job",
    "MaxMemPerLimit": "slurm.mem exceeds the memory that a job may use",
    "Nodes required for job are DOWN": "wait, or choose other nodes",
    "PartitionConfig": "no node of the partition has the CPUs, memory or GPUs of the job",
    "PartitionDown": "the partition starts no jobs",
    "PartitionInactive": "the partition starts no jobs",
    "PartitionNodeLimit": "slurm.nodes exceeds the nodes of the partition",
    "PartitionTimeLimit": "slurm.time exceeds the limit of the partition",
    "QOSMaxWallDurationPerJobLimit": "slurm.time exceeds the limit of the QOS",
    "QOS": "the jobs have reached a limit of the QOS",
    "ReqNodeNotAvail": "nodes are down, drained or reserved",
    "launch failed requeued held": "the job could not start; `scontrol release` tries again",
}
"""Explanations of reasons by their beginning. Other reasons (Resources, Priority) explain
themselves, or are explained by `man squeue`."""


class Task(NamedTuple):
    """Job of a cell: id (`123_4`), state in squeue, folder of its batch, attempts before it.

    `reason` is the reason for which a pending job waits, or an empty string.
    """

    id: str
    state: str
    batch: Path
    attempts: int
    reason: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in OVER


class Batch(NamedTuple):
    """Job array: folder of the study, folder of the array, and its cells (see BATCH)."""

    study: Path
    folder: Path
    cells: list[tuple[str, int]]


class ListedJob(NamedTuple):
    """Line of squeue: index in the array (not a number for a single job), id, state, name, reason.

    The reason comes last because it can contain any character.
    """

    array_index: str
    id: str
    state: str
    name: str
    reason: str = ""


def find_tasks(studies: Iterable[Path], timeout: float = TIMEOUT) -> dict[Path, Task]:
    """Return the job of every cell that SLURM still knows, by the cell's folder.

    `studies` are the folders of the studies. SLURM forgets a job minutes after its end (MinJobAge).
    Raises OSError if SLURM does not answer.
    """
    batches: dict[str, Batch] = {}
    for study in studies:
        for path in (study / ".slurm").glob("*/batch.json"):
            with contextlib.suppress(ValidationError):
                cells = BATCH.validate_json(path.read_bytes())
                batches[NAME + path.parent.name] = Batch(study, path.parent, cells)
    if not batches:
        return {}
    tasks: list[tuple[Path, Task]] = []
    for job in list_jobs(timeout):
        if job.name not in batches:
            continue
        batch = batches[job.name]
        is_numbered = job.array_index.isdecimal()
        if not is_numbered and len(batch.cells) > 1:
            # SLURM lists the cancelled jobs of an array that have not started as one job.
            continue
        position = int(job.array_index) if is_numbered else 0
        if position >= len(batch.cells):
            # The folder of another array has been copied here.
            continue
        cell, attempts = batch.cells[position]
        task = Task(job.id, job.state, batch.folder, attempts, _read_reason(job))
        tasks.append((batch.study / cell, task))
    # The job of a cell that counts is the active one, or else the newest: it comes last.
    tasks.sort(key=lambda pair: (not pair[1].is_over, int(pair[1].id.split("_")[0])))
    return dict(tasks)


def list_jobs(timeout: float = TIMEOUT) -> list[ListedJob]:
    """Return the user's jobs that SLURM still knows."""
    output = run_command(
        "squeue",
        "--noheader",
        "--array",
        "--states=all",
        f"--user={getpass.getuser()}",
        "--format=%K|%i|%T|%j|%r",
        timeout=timeout,
    )
    jobs = []
    for line in output.splitlines():
        fields = line.split("|", 4)
        # An incomplete line has no name, so it belongs to no batch.
        fields += [""] * (len(ListedJob._fields) - len(fields))
        jobs.append(ListedJob(*fields))
    return jobs


def _read_reason(job: ListedJob) -> str:
    """Return the reason for which a job waits, or "" if it does not wait or SLURM has none yet."""
    reason = job.reason.strip()
    return reason if job.state == "PENDING" and reason != "None" else ""


def describe_reasons(tasks: Iterable[Task]) -> dict[str, str]:
    """Return a line for each reason for which jobs wait, by reason."""
    counts = Counter(task.reason for task in tasks if task.reason)
    lines = {}
    for reason, count in counts.items():
        hints = [hint for start, hint in HINTS.items() if reason.startswith(start)]
        hint = f" ({hints[0]})" if hints else ""
        lines[reason] = f"waiting  {plural(count, 'job')} in SLURM's queue: {reason}{hint}"
    return lines


def describe_queues(studies: list[Path]) -> dict[Path, list[str]]:
    """Return for each study's folder the lines of `status` about its jobs that wait.

    Studies without jobs, and machines without SLURM, have no lines.
    """
    if shutil.which("squeue") is None:
        return {}
    try:
        tasks = find_tasks(studies, STATUS_TIMEOUT)
    except OSError as error:
        return {study: [f"SLURM does not answer: {error}"] for study in studies}
    lines = {}
    for study in studies:
        waiting = [task for folder, task in tasks.items() if study in folder.parents]
        lines[study] = list(describe_reasons(waiting).values())
    return lines


def cancel(matrices: list["Matrix"], only_removed: bool = False) -> int:
    """Cancel the active jobs, whose cells save and end, and return their number.

    `only_removed` leaves the jobs of cells that the study still has.
    """
    kept: set[Path] = set()
    if only_removed:
        for matrix in matrices:
            plan = matrix.plan()
            kept.update(matrix.folder / cell.path for cell in plan.cells)
            kept.update(matrix.folder / cell.path for cell in plan.trials)
    try:
        tasks = find_tasks(matrix.folder for matrix in matrices)
        ids = [task.id for path, task in tasks.items() if not task.is_over and path not in kept]
        if ids:
            run_command("scancel", *ids)
    except OSError as error:
        raise ConfigError(f"--cancel: {error}") from error
    return len(ids)
