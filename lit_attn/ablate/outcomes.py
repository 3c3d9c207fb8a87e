"""Outcomes of the cells of a run, and the lines that the display shows about them."""

import errno
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from lit_attn.ablate.display import Snapshot, StartedCell
from lit_attn.ablate.job import Job
from lit_attn.cells import failure, folder
from lit_attn.cells.records import FailureClass
from lit_attn.schema.errors import program

Observer = Callable[[Job], str]
"""Function that gets every cell that has ended, and returns a line for the display or nothing."""


def observe_nothing(ended: Job) -> str:
    """Return no line."""
    return ""


@dataclass(frozen=True)
class Outcome:
    """End of a cell in this run; `failure` is None if the cell has a result.

    `is_stopped`: the user stopped the run.
    """

    job: Job
    seconds: float
    failure: FailureClass | None = None
    message: str = ""
    is_stopped: bool = False

    def describe(self) -> str:
        """Return the line of the display about the end of the cell."""
        if self.failure is None:
            return f"done     {self.job.name}  {self.seconds:.1f} s"
        if self.is_stopped:
            return f"stopped  {self.job.name}"
        run_alone = f"run alone: {program('train', self.job.folder)}"
        message = self.message
        if self.failure == "out-of-memory":
            message += f"; {failure.MEMORY_ADVICE}"
        return f"FAILED   {self.job.name}  {self.failure}: {message}\n         {run_alone}"


@dataclass
class Summary:
    """Outcomes of a run, and the signal that ended the run early."""

    outcomes: list[Outcome] = field(default_factory=list)
    stopped_by: signal.Signals | None = None

    @property
    def failed(self) -> list[Outcome]:
        return [
            outcome
            for outcome in self.outcomes
            if outcome.failure is not None and not outcome.is_stopped
        ]

    def snapshot(self, waiting: list[str], running: list[StartedCell], slots: int) -> Snapshot:
        """Return the state of the run for the display."""
        done = [outcome for outcome in self.outcomes if outcome.failure is None]
        durations = [(o.job.name, o.seconds) for o in done if o.seconds]
        return Snapshot(len(done), len(self.failed), waiting, running, durations, slots)


def describe_same_failures(outcome: Outcome) -> str:
    """Return the same text for failures that further seeds would repeat, or "" for others."""
    if outcome.failure not in folder.FINAL_FAILURES:
        return ""
    if outcome.failure == "diverged":
        return "diverged: "
    # Messages may differ in numbers, such as sizes and steps.
    message = re.sub(r"\d+", "", outcome.message)
    return f"{outcome.failure}: {message}"


def describe_exception(outcome: Outcome) -> str:
    """Return the exception of a cell that a mistake in code has ended, without numbers, or ""."""
    if outcome.failure != "error" or not failure.EXCEPTION.match(outcome.message):
        return ""
    return re.sub(r"\d+", "N", outcome.message)


def make_os_failure(job: Job, seconds: float, error: OSError) -> Outcome:
    """Return the outcome of a cell whose folder could not be read or written."""
    message = f"{type(error).__name__}: {error}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        # This process has too many open files, which is not a fault of the cell.
        return Outcome(job, seconds, "killed", message)
    return Outcome(job, seconds, failure.classify_failure(1, message), message)
