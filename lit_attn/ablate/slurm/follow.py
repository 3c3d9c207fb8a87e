"""Wait for the ends of cells whose jobs SLURM runs."""

import contextlib
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from lit_attn.ablate.display import Display, Snapshot, StartedCell
from lit_attn.ablate.job import Job
from lit_attn.ablate.outcomes import Observer, Outcome, Summary, observe_nothing
from lit_attn.ablate.plan import Matrix
from lit_attn.ablate.runner import TICK
from lit_attn.ablate.signals import handle_signals
from lit_attn.ablate.slurm.queue import ENDS, Task, describe_reasons, find_tasks
from lit_attn.cells import failure, folder
from lit_attn.cells.records import Exit, FailureClass
from lit_attn.schema.errors import plural

POLL = 10.0  # Seconds between two requests to SLURM.
ABSENCES = 2
"""Requests that find neither job nor result until a cell has failed: a disk may be late."""

LAUNCHER_LINE = re.compile(r"^(srun|slurmstepd|slurmstepd-\S+|submitit)\b|^Try \"")
"""Line of a job's output by SLURM or submitit, which reports the end of a job and not its cause."""
REPORTED_END = re.compile(
    r"Exited with exit code|Terminat|Killed|Job step aborted|got SIGCONT|CANCELLED"
    r"|forcing job termination|launch/slurm"
)
"""Text of a line of srun or slurmstepd that follows from the end of a job."""


class Follower:
    """Waits until every cell has a result or its job is over.

    The lines of `observe`, which gets every cell that has ended, are displayed.
    """

    def __init__(
        self,
        matrices: list[Matrix],
        display: Display,
        observe: Observer = observe_nothing,
    ) -> None:
        self.matrices = matrices
        self.display = display
        self.observe = observe
        self.tasks: dict[Path, Task] = {}
        self.unfinished: list[Job] = []
        self.started: dict[Path, float] = {}
        self.absences: Counter[Path] = Counter()
        self.reasons: set[str] = set()  # Reasons for which jobs wait that were reported.
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
            self.tasks = find_tasks(matrix.folder for matrix in self.matrices)
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
                line = self.observe(job)
                if line:
                    self.display.add_event(line)
        self._report_reasons()

    def _report_reasons(self) -> None:
        """Report each reason for which jobs wait once."""
        tasks = [self.tasks[job.folder] for job in self.unfinished if job.folder in self.tasks]
        for reason, line in describe_reasons(tasks).items():
            if reason not in self.reasons:
                self.reasons.add(reason)
                self.display.add_event(line)

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
        cause = find_cause(output)
        failure_class = failure.classify_failure(1, cause)
        message = f"its job ended before the cell began: {task.state}; {cause}"
    return Exit(failure=failure_class, returncode=1, message=message)


def find_cause(output: str) -> str:
    """Return the line of a job's error output that says why the job failed.

    This is the last line of a program that the job has started. Without one it is the last line of
    SLURM that does not only report that a task has ended.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    by_programs = [line for line in lines if not LAUNCHER_LINE.search(line)]
    by_slurm = [line for line in lines if not REPORTED_END.search(line)]
    for candidates in (by_programs, by_slurm, lines):
        if candidates:
            return candidates[-1]
    return "its output is empty"
