"""Follower of cells that run as SLURM jobs, with the display of a run on one machine.

The jobs do not depend on the follower: when it ends, they go on, and the same command follows them
again.
"""

import contextlib
import datetime
import signal
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from lit_attn.ablate.display import Display, Snapshot
from lit_attn.ablate.plan import Job, Matrix
from lit_attn.ablate.runner import TICK, Outcome, Summary, handle_signals
from lit_attn.ablate.slurm.queue import ENDS, Task, find_tasks
from lit_attn.ablate.time_left import StartedCell
from lit_attn.cells import failure, folder
from lit_attn.cells.records import Exit

POLL = 10.0
"""Seconds between two requests to SLURM."""
ABSENCES = 2
"""Consecutive requests that find neither a job nor a result before a cell counts as failed: a
network disk may show the result late."""


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
            self.display.open()
            try:
                while self.unfinished and self.summary.stopped_by is None:
                    self.poll()
                    polled = time.monotonic()
                    while self.summary.stopped_by is None and time.monotonic() - polled < POLL:
                        self.display.update(self._snapshot())
                        if not self.unfinished:
                            break
                        time.sleep(TICK)
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
                self.display.say(f"SLURM does not answer: {error}")
            self.has_answer = False
            return
        for job in list(self.unfinished):
            outcome = self._outcome(job, self.tasks.get(job.folder))
            if outcome is not None:
                self.unfinished.remove(job)
                self._finish(outcome)

    def _outcome(self, job: Job, task: Task | None) -> Outcome | None:
        """Return the outcome of a cell, or None if it has not ended."""
        if task is not None and task.is_running:
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

    def _finish(self, outcome: Outcome) -> None:
        self.summary.outcomes.append(outcome)
        name = outcome.job.name
        if outcome.failure is None:
            self.display.say(f"done     {name}")
            return
        command = folder.rerun_command(outcome.job.folder)
        reason = f"{outcome.failure}: {outcome.message}"
        self.display.say(f"FAILED   {name}  {reason}\n         run alone: {command}")

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.summary.stopped_by = signal.Signals(number)
        self.display.say(
            f"{len(self.unfinished)} jobs go on; the same command follows them again, and with "
            "--cancel it cancels them"
        )

    def _snapshot(self) -> Snapshot:
        now = time.monotonic()
        running = [
            StartedCell(
                job.name, folder.read_progress(job.folder), now - self.started.get(job.folder, now)
            )
            for job in self.unfinished
            if (task := self.tasks.get(job.folder)) is not None and task.is_running
        ]
        names = {cell.name for cell in running}
        done = [outcome for outcome in self.summary.outcomes if outcome.failure is None]
        return Snapshot(
            done=len(done),
            failed=len(self.summary.failed),
            waiting=[job.name for job in self.unfinished if job.name not in names],
            running=running,
            durations=[(o.job.name, o.seconds) for o in done if o.seconds],
            slots=max(1, len(running)),
        )


def _read_end(job: Job, task: Task | None) -> Exit:
    """Return how a cell without a result ended: as its job recorded it, or as SLURM reports it."""
    attempts = folder.list_attempts(job.folder)
    new = [] if task is None else attempts[task.cell.attempts :]
    if new and (end := folder.read_exit(new[-1])) is not None:
        return end
    failure_class: failure.FailureClass
    if task is None:
        failure_class, message = "killed", "SLURM does not know its job any more"
    elif task.state in ENDS or new:
        # The runner in the job records all other ends.
        failure_class, message = ENDS.get(task.state, "killed"), f"its job ended: {task.state}"
    else:
        line = task.last_line()
        failure_class = failure.classify_failure(1, line)
        message = f"its job ended before the cell began: {task.state}; last line: {line}"
    end = Exit(
        failure=failure_class,
        returncode=1,
        message=message,
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    with contextlib.suppress(OSError):
        # On a full disk the record is lost; the other cells are still followed.
        end.write((new[-1] if new else folder.create_attempt(job.folder)) / "exit.json")
    return end
