"""Runner of one cell, which a SLURM job runs on its first node.

SLURM ends a job in two ways. It sends SIGTERM if it requeues the job itself (preemption) or if the
job was cancelled: the cell writes a checkpoint, and the job ends. It sends SIGUSR2 shortly before
the time limit: the cell writes a checkpoint, and submitit requeues the job as often as the study's
`slurm.timeouts` allows.

On one node the runner starts the processes of the cell itself. On several nodes it is the batch
script of the job, and `srun` starts them (lit_attn.cells.nodes). A cell that such a job has lost is
tried again in the next run of the job: its processes on other nodes are certainly dead only when
the job has ended, and SLURM then replaces a broken node.
"""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lit_attn.ablate.display import Display
from lit_attn.ablate.job import Job
from lit_attn.ablate.launch import Launcher, start_server
from lit_attn.ablate.runner import RETRIES, Runner
from lit_attn.ablate.slots import Slots, make_slots
from lit_attn.cells import folder
from lit_attn.cells.nodes import NODES
from lit_attn.config.slurm import WARNING

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

SAVING = WARNING - 30.0
"""Seconds of WARNING that a cell has to write its checkpoint. The rest is for the records of its
end and for the request that queues the job again."""


def may_retry(cell: Path) -> bool:
    """Return True if a cell of several nodes may run again after its last failure.

    A failure class allows as many retries as on one machine, one after the other. Attempts that
    were told to stop do not count.
    """
    ends = [folder.read_exit(attempt) for attempt in folder.list_attempts(cell)]
    failures = [end for end in ends if end is not None and not end.is_stopped]
    if not failures:
        return False
    last = failures[-1].failure
    others = [number for number, end in enumerate(failures) if end.failure != last]
    in_a_row = len(failures) - 1 - max(others, default=-1)
    return in_a_row <= RETRIES.get(last, 0)


@dataclass(frozen=True)
class SlurmCell:
    """Callable that submitit runs in the job."""

    target: str
    smoke: bool
    stall: float
    job: Job
    nodes: int

    def __call__(self) -> None:
        """Run the cell. Raises RuntimeError if it has no result, unless the job is requeued."""
        job = self.job
        requeue = signal.getsignal(signal.SIGUSR2)  # submitit's
        assert callable(requeue)
        progress_before = folder.progress_mtime(job.folder)

        def has_progress() -> bool:
            return folder.progress_mtime(job.folder) != progress_before

        def stop(number: int, frame: FrameType | None) -> None:
            runner.grace = SAVING
            runner.overdue = "the time limit of its job was reached"
            if not has_progress():
                runner.overdue += " before its first step; increase slurm.time"
            signal.raise_signal(signal.SIGTERM)

        os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        # SLURM signals every process of a job, so the fork server must ignore SIGUSR2 at once.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        slots = self._make_slots()
        launcher = Launcher(self.target, self.smoke)
        start_server()
        runner = Runner(launcher, slots, Display(sys.stdout), self.stall)
        if self.nodes > 1:
            # Only another run of the job tries the cell again.
            runner.retries = {}
        # SLURM sends it before the time limit.
        signal.signal(signal.SIGUSR2, stop)
        summary = runner.run([job])
        if job.state() == "done":
            return
        if runner.overdue and not has_progress():
            raise RuntimeError(f"{job.name}: {runner.overdue}")
        if runner.overdue:
            requeue(signal.SIGUSR2, None)
        if self.nodes > 1 and summary.stopped_by is None and may_retry(job.folder):
            requeue(signal.SIGUSR2, None)
        reason = "stopped before it began"
        if summary.outcomes:
            reason = summary.outcomes[-1].message
        raise RuntimeError(f"{job.name}: {reason}")

    def _make_slots(self) -> Slots:
        """Return slots with the devices of the cell. Raises ConfigError if there are too few."""
        if self.nodes > 1:
            os.environ[NODES] = str(self.nodes)
            # SLURM has reserved the devices, and each process sees those of its node.
            return Slots([None] * self.job.processes, 1)
        slots = make_slots(1)
        slots.check([self.job])
        return slots

    def checkpoint(self) -> "DelayedSubmission":
        """Return what submitit requeues: the same call, which resumes from the checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
