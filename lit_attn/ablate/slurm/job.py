"""Runner of one cell on one node, which a SLURM job runs.

SLURM ends a job in two ways. It sends SIGTERM if it requeues the job itself (preemption) or if the
job was cancelled: the cell writes a checkpoint, and the job ends. It sends SIGUSR2 shortly before
the time limit: the cell writes a checkpoint, and submitit requeues the job as often as the study's
`slurm.timeouts` allows.
"""

import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lit_attn.ablate.display import Display
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.plan import Job
from lit_attn.ablate.runner import Runner
from lit_attn.ablate.slots import make_slots
from lit_attn.cells import folder
from lit_attn.config.cell import Cell
from lit_attn.config.slurm import WARNING

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

SAVING = WARNING - 30.0
"""Seconds of WARNING that a cell has to write its checkpoint. The rest is for the records of its
end and for the request that queues the job again."""


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
        progress_before = folder.progress_mtime(self.folder)
        runner = Runner(launcher, slots, Display(sys.stdout), self.stall)
        # SLURM sends it before the time limit.
        signal.signal(signal.SIGUSR2, stop)
        summary = runner.run([job])
        if job.state() == "done":
            return
        if is_over_time:
            has_progress = folder.progress_mtime(self.folder) != progress_before
            message = self._record_timeout(has_progress)
            if not has_progress:
                raise RuntimeError(f"{job.name}: {message}")
            requeue(signal.SIGUSR2, None)
        reason = "stopped before it began"
        if summary.outcomes:
            reason = summary.outcomes[-1].message
        raise RuntimeError(f"{job.name}: {reason}")

    def _record_timeout(self, has_progress: bool) -> str:
        """Correct the record of the last attempt, since the runner has only seen a SIGTERM.

        Return the message of the record.
        """
        message = "the time limit of its job was reached"
        if not has_progress:
            message += " before its first step; increase slurm.time"
        attempts = folder.list_attempts(self.folder)
        end = folder.read_exit(attempts[-1]) if attempts else None
        if end is not None:
            changes = {"failure": "timed-out", "message": message}
            end.model_copy(update=changes).write(attempts[-1] / "exit.json")
        return message

    def checkpoint(self) -> "DelayedSubmission":
        """Return what submitit requeues: the same call, which resumes from the checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
