"""Cells as SLURM jobs: submission, search, display and cancellation, and what a job runs.

A batch is a job array of cells of one study. Its folder `<study>/.slurm/<token>/` lists the cells
before the array is submitted, and the array is named after the token. A later command on any
terminal asks `squeue` for jobs of that name and so finds the job of every cell. The jobs do not
depend on the command that follows them.

A job is a runner of one cell on one node. SLURM ends it in two ways. It sends SIGTERM if it
requeues the job itself (preemption) or if the job was cancelled: the cell writes a checkpoint, and
the job ends. It sends SIGUSR2 shortly before the time limit: the cell writes a checkpoint, and
submitit requeues the job as often as the study's `slurm.timeouts` allows.
"""

import contextlib
import getpass
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from pydantic import TypeAdapter, ValidationError

from lit_attn.ablate import snapshot as code
from lit_attn.ablate.display import Display, Snapshot, StartedCell
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.plan import Job, Matrix
from lit_attn.ablate.runner import TICK, Outcome, Runner, Summary, handle_signals
from lit_attn.ablate.slots import make_slots
from lit_attn.cells import failure, folder
from lit_attn.cells.records import Exit, FailureClass
from lit_attn.config.cell import Cell
from lit_attn.extras import require
from lit_attn.files import one_at_a_time, write_atomic
from lit_attn.schema.errors import ConfigError, plural

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

NAME = "lit_attn-"
KILLED = {"CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED"}
ENDS: dict[str, FailureClass] = dict.fromkeys(KILLED, "killed")
ENDS |= {"TIMEOUT": "timed-out", "DEADLINE": "timed-out", "OUT_OF_MEMORY": "out-of-memory"}
"""Failure classes of the states in squeue that name the reason of a job's end."""
BATCH = TypeAdapter(list[tuple[str, int]])
"""Cells of a job array by index: folder below the study's, attempts before the submission."""
OVER = {*ENDS, "COMPLETED", "FAILED"}
"""States of jobs that have ended. Jobs in all other states wait or run."""
MAX_ARRAY = 1000  # Jobs of one array; SLURM's default limit is 1001.
WARNING = 120  # Seconds before the time limit at which a job is told to write a checkpoint.
SAVING = WARNING - 30.0
"""Seconds of WARNING that a cell has to write its checkpoint. The rest is for the records of its
end and for the request that queues the job again."""
POLL = 10.0  # Seconds between two requests to SLURM.
ABSENCES = 2
"""Requests that find neither job nor result until a cell has failed: a disk may be late."""


@dataclass(frozen=True)
class SlurmCell:
    """Callable that submitit runs in the job; `folder` contains the config.yaml of the cell."""

    folder: Path
    target: str
    smoke: bool
    stall: float

    def __call__(self) -> None:
        """Run the cell. Raises RuntimeError if it has no result, unless the job is requeued."""
        job = Job(Cell.read(self.folder / "config.yaml"), self.folder)
        requeue = signal.getsignal(signal.SIGUSR2)  # submitit's
        assert callable(requeue)
        is_over_time = False

        def stop(number: int, frame: FrameType | None) -> None:
            nonlocal is_over_time
            is_over_time = True
            runner.grace = SAVING
            signal.raise_signal(signal.SIGTERM)

        os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        # SLURM signals every process of a job, so the fork server must ignore SIGUSR2 at once.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        slots = make_slots(1)
        slots.check([job.cell])
        launcher = Launcher(self.target, self.smoke)
        forkserver.ensure_running()
        runner = Runner(launcher, slots, Display(sys.stdout), self.stall)
        # SLURM sends it before the time limit.
        signal.signal(signal.SIGUSR2, stop)
        summary = runner.run([job])
        if job.state() == "done":
            return
        if is_over_time:
            self._record_timeout()
            requeue(signal.SIGUSR2, None)
        reason = "stopped before it began"
        if summary.outcomes:
            reason = summary.outcomes[-1].message
        raise RuntimeError(f"{job.name}: {reason}")

    def _record_timeout(self) -> None:
        """Correct the record of the last attempt, since the runner has only seen a SIGTERM."""
        attempts = folder.list_attempts(self.folder)
        if not attempts:
            return
        end = folder.read_exit(attempts[-1])
        if end is not None:
            changes = {"failure": "timed-out", "message": "the time limit of its job was reached"}
            end.model_copy(update=changes).write(attempts[-1] / "exit.json")

    def checkpoint(self) -> "DelayedSubmission":
        """Return what submitit requeues: the same call, which resumes from the checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class Task(NamedTuple):
    """Job of a cell: id (`123_4`), state in squeue, folder of its batch, attempts before it."""

    id: str
    state: str
    batch: Path
    attempts: int

    @property
    def is_over(self) -> bool:
        return self.state in OVER


class Batch(NamedTuple):
    """Job array: folder of the study, folder of the array, and its cells (see BATCH)."""

    study: Path
    folder: Path
    cells: list[tuple[str, int]]


class ListedJob(NamedTuple):
    """Line of squeue: index in the array (not a number for a single job), id, state and name."""

    array_index: str
    id: str
    state: str
    name: str


def find_tasks(matrices: Iterable[Matrix]) -> dict[Path, Task]:
    """Return the job of every cell that SLURM still knows, by the cell's folder.

    SLURM forgets a job minutes after its end (MinJobAge). Raises OSError if it does not answer.
    """
    batches: dict[str, Batch] = {}
    for matrix in matrices:
        for path in (matrix.folder / ".slurm").glob("*/batch.json"):
            with contextlib.suppress(ValidationError):
                cells = BATCH.validate_json(path.read_bytes())
                batches[NAME + path.parent.name] = Batch(matrix.folder, path.parent, cells)
    if not batches:
        return {}
    tasks: list[tuple[Path, Task]] = []
    for job in _list_jobs():
        if job.name not in batches:
            continue
        batch = batches[job.name]
        position = int(job.array_index) if job.array_index.isdecimal() else 0
        cell, attempts = batch.cells[position]
        task = Task(job.id, job.state, batch.folder, attempts)
        tasks.append((batch.study / cell, task))
    # The job of a cell that counts is the active one, or else the newest: it comes last.
    tasks.sort(key=lambda pair: (not pair[1].is_over, int(pair[1].id.split("_")[0])))
    return dict(tasks)


def _list_jobs() -> list[ListedJob]:
    """Return the user's jobs that SLURM still knows."""
    output = _run(
        "squeue",
        "--noheader",
        "--array",
        "--states=all",
        f"--user={getpass.getuser()}",
        "--format=%K|%i|%T|%j",
    )
    jobs = []
    for line in output.splitlines():
        fields = line.split("|", 3)
        # An incomplete line has no name, so it belongs to no batch.
        fields += [""] * (len(ListedJob._fields) - len(fields))
        jobs.append(ListedJob(*fields))
    return jobs


@cache
def _read_cluster() -> str:
    """Return the name of the cluster that this machine submits to."""
    name = re.search(r"^ClusterName\s*=\s*(.*)$", _run("scontrol", "show", "config"), re.M)
    return "" if name is None else name[1]


def cancel(matrices: list[Matrix], only_removed: bool = False) -> int:
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
        tasks = find_tasks(matrices)
        ids = [task.id for path, task in tasks.items() if not task.is_over and path not in kept]
        if ids:
            _run("scancel", *ids)
    except OSError as error:
        raise ConfigError(f"--cancel: {error}") from error
    return len(ids)


def _run(*command: str) -> str:
    """Return a command's output; OSError if it fails, ConfigError if it does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError as error:
        raise ConfigError(f"--launcher slurm: command '{command[0]}' not found") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} does not answer") from error
    if done.returncode:
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        raise OSError(f"{command[0]}: {reason}")
    return done.stdout


def require_resources(matrix: Matrix) -> None:
    """Raise ConfigError if the `slurm:` section of a study does not suffice for its cells."""
    gpus = matrix.source.study.slurm.gpus
    largest = max(variant.experiment.training.devices for variant in matrix.written)
    if gpus is not None and gpus < largest:
        raise ConfigError(
            f"{matrix.source.name}: training.devices: {largest} exceeds"
            f" the {gpus} GPUs of slurm.gpus"
        )


def submit_missing(
    matrices: list[Matrix], missing: list[Job], cell: SlurmCell, at_once: int | None
) -> int:
    """Submit the `missing` cells that are not running and have no job. Return their number.

    `cell` is a job without its folder. At most `at_once` cells of a study run at once. Raises
    ConfigError if submitit is missing, or if SLURM does not answer or refuses.
    """
    try:
        tasks = find_tasks(matrices)
        cluster = _read_cluster()
    except OSError as error:
        raise ConfigError(f"--launcher slurm: {error}") from error
    queued = {folder for folder, task in tasks.items() if not task.is_over}
    jobs = [job for job in missing if job.folder not in queued and job.state() != "running"]
    if not jobs:
        return 0
    out = matrices[0].folder.parent
    with one_at_a_time(out / code.STORE, "code"):
        parts: list[Path] = []
        for matrix in matrices:
            parts += matrix.source.parts
        snapshot = code.take_snapshot(out, parts)
        for matrix in matrices:
            study_jobs = [job for job in jobs if job.cell.study == matrix.name]
            for start in range(0, len(study_jobs), MAX_ARRAY):
                _submit(matrix, study_jobs[start : start + MAX_ARRAY], cell, at_once, snapshot)
        # If SLURM or the disk does not answer, the next submission removes them.
        with contextlib.suppress(OSError):
            queue = {job.name.removeprefix(NAME) for job in _list_jobs()}
            code.remove_unneeded(out, queue, cluster)
    return len(jobs)


def _submit(
    matrix: Matrix, jobs: list[Job], cell: SlurmCell, at_once: int | None, snapshot: Path
) -> None:
    """Submit cells of a study as one job array, which runs the code of `snapshot`."""
    require("submitit", "--launcher slurm", "slurm")
    from submitit.core.utils import FailedJobError
    from submitit.slurm.slurm import SlurmExecutor

    slurm = matrix.source.study.slurm
    token = secrets.token_hex(4)
    batch = matrix.folder / ".slurm" / token
    for job in jobs:
        job.cell.write(job.folder / "config.yaml")
    # Written before the submission, so that a later command finds the jobs even if this one dies.
    cells = [(job.cell.folder, len(folder.list_attempts(job.folder))) for job in jobs]
    write_atomic(batch / code.RECORD, f"{snapshot.name}\n{_read_cluster()}")
    write_atomic(batch / "batch.json", BATCH.dump_json(cells))
    parameters = slurm.model_dump(include={"partition", "account", "qos", "constraint", "mem"})
    parameters |= {"gpus_per_node": slurm.gpus, "cpus_per_task": slurm.cpus, "time": slurm.minutes}
    parameters["setup"] = [*slurm.setup, *code.activation_lines(snapshot)]
    # Without a value, the cluster's default applies.
    parameters = {name: value for name, value in parameters.items() if value is not None}
    try:
        executor = SlurmExecutor(batch, max_num_timeout=slurm.timeouts)
        executor.update_parameters(
            job_name=NAME + token,
            array_parallelism=min(at_once or len(jobs), len(jobs)),
            signal_delay_s=WARNING,
            # Since SLURM 22.05, srun does not inherit sbatch's number of cores.
            srun_args=[f"--cpus-per-task={slurm.cpus}"],
            **parameters,
        )
        with executor.batch():
            for job in jobs:
                executor.submit(replace(cell, folder=job.folder.resolve()))
    except (FailedJobError, RuntimeError) as error:
        last_line = str(error).strip().splitlines()[-1]
        raise ConfigError(f"--launcher slurm: {last_line}") from error


class Follower:
    """Waits until every cell has a result or its job is over."""

    def __init__(self, matrices: list[Matrix], display: Display) -> None:
        self.matrices = matrices
        self.display = display
        self.tasks: dict[Path, Task] = {}
        self.unfinished: list[Job] = []
        self.started: dict[Path, float] = {}
        self.absences: Counter[Path] = Counter()
        self.summary = Summary()
        self.has_answer = True

    def run(self, jobs: Iterable[Job]) -> Summary:
        """Follow the SLURM jobs of `jobs`, whichever command submitted them."""
        self.unfinished = list(jobs)
        with handle_signals(self._interrupt):
            try:
                next_poll = 0.0
                while self.unfinished and self.summary.stopped_by is None:
                    if time.monotonic() >= next_poll:
                        self.poll()
                        next_poll = time.monotonic() + POLL
                    self.display.update(self._snapshot())
                    time.sleep(TICK if self.unfinished else 0)
            finally:
                self.display.close()
        return self.summary

    def poll(self) -> None:
        """Ask SLURM for the jobs, and record the ends of cells. Without an answer, nothing ends."""
        try:
            self.tasks = find_tasks(self.matrices)
            self.has_answer = True
        except OSError as error:
            if self.has_answer:
                self.display.add_event(f"SLURM does not answer: {error}")
            self.has_answer = False
            return
        for job in list(self.unfinished):
            outcome = self._outcome(job, self.tasks.get(job.folder))
            if outcome is not None:
                self.unfinished.remove(job)
                self.summary.outcomes.append(outcome)
                self.display.add_event(outcome.describe())

    def _outcome(self, job: Job, task: Task | None) -> Outcome | None:
        """Return the outcome of a cell, or None if it has not ended."""
        if task is not None and task.state == "RUNNING":
            self.started.setdefault(job.folder, time.monotonic())
        seconds = time.monotonic() - self.started.get(job.folder, time.monotonic())
        state = job.state()
        if state == "done":
            return Outcome(job, seconds)
        if state == "running" or (task is not None and not task.is_over):
            del self.absences[job.folder]
            return None
        self.absences[job.folder] += 1
        if self.absences[job.folder] < ABSENCES:
            return None
        end = _read_end(job, task)
        return Outcome(job, seconds, end.failure, end.message)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.summary.stopped_by = signal.Signals(number)
        jobs = plural(len(self.unfinished), "job")
        self.display.add_event(
            f"not stopped: {jobs}; the same command follows them again, and with --cancel it"
            " cancels them"
        )

    def _snapshot(self) -> Snapshot:
        now = time.monotonic()
        running = []
        waiting = []
        for job in self.unfinished:
            task = self.tasks.get(job.folder)
            if task is None or task.state != "RUNNING":
                waiting.append(job.name)
                continue
            seconds = now - self.started.get(job.folder, now)
            running.append(StartedCell(job.name, folder.read_progress(job.folder), seconds))
        return self.summary.snapshot(waiting, running, max(1, len(running)))


def _read_end(job: Job, task: Task | None) -> Exit:
    """Return how a cell without a result ended: as its job recorded it, or as SLURM reports it."""
    # Attempts that the cell made in this job.
    attempts: list[Path] = []
    if task is not None:
        attempts = folder.list_attempts(job.folder)[task.attempts :]
    if attempts:
        recorded = folder.read_exit(attempts[-1])
        if recorded is not None:
            return recorded
    end = _infer_end(task, has_begun=bool(attempts))
    with contextlib.suppress(OSError):
        # On a full disk the record is lost; the other cells are still followed.
        attempt = attempts[-1] if attempts else folder.create_attempt(job.folder)
        end.write(attempt / "exit.json")
    return end


def _infer_end(task: Task | None, has_begun: bool) -> Exit:
    """Return how a cell without a record ended, from the state of its job."""
    failure_class: FailureClass
    if task is None:
        failure_class = "killed"
        message = "SLURM does not know its job any more"
    elif task.state in ENDS or has_begun:
        # The runner in the job records all other ends.
        failure_class = ENDS.get(task.state, "killed")
        message = f"its job ended: {task.state}"
    else:
        # The job's own error output is not the log of the cell.
        paths = sorted(task.batch.glob(f"{task.id}_*_log.err"))
        output = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
        last_line = output.strip().rpartition("\n")[2].strip()
        failure_class = failure.classify_failure(1, last_line)
        message = f"its job ended before the cell began: {task.state}; last line: {last_line}"
    return Exit(failure=failure_class, returncode=1, message=message)
