"""Follows cells that run as SLURM's jobs, with the display of a run on one machine.

The jobs need nobody to follow them: when this ends, however it ends, they go on, and the same
command follows them again.
"""

import contextlib
import datetime
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from lit_attn.ablate.display import Display, Snapshot
from lit_attn.ablate.plan import Job, Matrix
from lit_attn.ablate.runner import TICK, Outcome, Summary, handle_signals
from lit_attn.ablate.slurm.queue import ENDS, Task, find
from lit_attn.ablate.time_left import StartedCell
from lit_attn.cells import failure, folder
from lit_attn.cells.records import Exit

POLL = 10.0
"""Seconds between two questions to SLURM."""
SURE = 2
"""Times in a row that a cell has to be without job and result before it is taken to have failed: a
network disk may show the result late."""


class Follower:
    """Waits until every cell has a result or its job is over."""

    def __init__(self, matrices: list[Matrix], display: Display) -> None:
        self.matrices = matrices
        self.display = display
        self.tasks: dict[Path, Task] = {}
        self.left: list[Job] = []
        self.began: dict[Path, float] = {}
        self.absent: dict[Path, int] = {}
        self.summary = Summary()
        self.answers = True

    def run(self, jobs: Iterable[Job]) -> Summary:
        """Follow the jobs of `jobs`, which were submitted by whomever."""
        self.left = list(jobs)
        with handle_signals(self._interrupt):
            self.display.open()
            try:
                while self.left and self.summary.stopped_by is None:
                    self._look()
                    asked = time.monotonic()
                    while self.summary.stopped_by is None and time.monotonic() - asked < POLL:
                        self.display.update(self._snapshot())
                        if not self.left:
                            break
                        time.sleep(TICK)
            finally:
                self.display.close()
        return self.summary

    def _look(self) -> None:
        """Ask SLURM, and record what is over. While it does not answer, nothing is."""
        try:
            self.tasks = find(self.matrices)
            self.answers = True
        except OSError as error:
            if self.answers:
                self.display.say(f"SLURM does not answer: {error}")
            self.answers = False
            return
        for job in list(self.left):
            outcome = self._outcome(job, self.tasks.get(job.folder))
            if outcome is not None:
                self.left.remove(job)
                self._finish(outcome)

    def _outcome(self, job: Job, task: Task | None) -> Outcome | None:
        """How the cell has ended; None where it has not."""
        if task is not None and task.runs:
            self.began.setdefault(job.folder, time.monotonic())
        seconds = time.monotonic() - self.began.get(job.folder, time.monotonic())
        state = job.state()
        if state == "done":
            return Outcome(job, seconds)
        if state == "running" or (task is not None and not task.is_over):
            self.absent.pop(job.folder, None)
            return None
        self.absent[job.folder] = self.absent.get(job.folder, 0) + 1
        if self.absent[job.folder] < SURE:
            return None
        ended = _ended(job, task)
        return Outcome(job, seconds, ended.failure, ended.message)

    def _finish(self, outcome: Outcome) -> None:
        self.summary.outcomes.append(outcome)
        name, why = outcome.job.name, f"{outcome.failure}: {outcome.message}"
        if outcome.failure is None:
            self.display.say(f"done     {name}")
        else:
            alone = folder.rerun_command(outcome.job.folder)
            self.display.say(f"FAILED   {name}  {why}\n         alone: {alone}")

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.summary.stopped_by = signal.Signals(number)
        self.display.say(
            f"{len(self.left)} jobs go on without this; the same command follows them again, and "
            "with --cancel it ends them"
        )

    def _snapshot(self) -> Snapshot:
        now = time.monotonic()
        running = [
            StartedCell(
                job.name, folder.read_progress(job.folder), now - self.began.get(job.folder, now)
            )
            for job in self.left
            if (task := self.tasks.get(job.folder)) is not None and task.runs
        ]
        begun = {cell.name for cell in running}
        done = [outcome for outcome in self.summary.outcomes if outcome.failure is None]
        return Snapshot(
            done=len(done),
            failed=len(self.summary.failed),
            waiting=[job.name for job in self.left if job.name not in begun],
            running=running,
            durations=[(o.job.name, o.seconds) for o in done if o.seconds],
            slots=max(1, len(running)),
        )


def _ended(job: Job, task: Task | None) -> Exit:
    """How a cell without a result ended: as its job recorded it, or else as SLURM says."""
    attempts = folder.list_attempts(job.folder)
    begun = [] if task is None else attempts[task.place.attempts :]
    if begun and (said := folder.read_exit(begun[-1])) is not None:
        return said
    if task is None:
        kind, message = "killed", "SLURM knows its job no more"
    elif task.state in ENDS or begun:
        # The runner in the job records every other end.
        kind, message = ENDS.get(task.state, "killed"), f"its job ended: {task.state}"
    else:
        words = task.last_words()
        kind = failure.classify_failure(1, words)
        message = f"its job ended before the cell began: {task.state}; it says: {words}"
    ended = Exit(
        failure=kind,
        returncode=1,
        message=message,
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    with contextlib.suppress(OSError):
        # Where the disk is full the record is lost, and the others are followed all the same.
        ended.write((begun[-1] if begun else folder.create_attempt(job.folder)) / "exit.json")
    return ended
