"""Inside of a SLURM job: a runner of one cell, or one rank of a cell that spans several nodes.

SLURM ends a job in two ways. It sends SIGTERM if it requeues the job itself (preemption) or if the
job was cancelled: the cell writes a checkpoint, and the job ends. It sends SIGUSR2 shortly before
the time limit: the cell writes a checkpoint, and submitit requeues the job as often as the study's
`slurm.timeouts` allows.
"""

import faulthandler
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lit_attn.ablate.display import Display
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.plan import Job
from lit_attn.ablate.runner import Limits, Runner
from lit_attn.ablate.slots import make_slots
from lit_attn.cells import failure, folder
from lit_attn.cells.failure import Preempted
from lit_attn.cells.lock import HEARTBEAT, hold_lock
from lit_attn.cells.ranks import ACROSS_NODES, redirect_output
from lit_attn.config.cell import Cell
from lit_attn.schema.base import load

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission


class TimeLimit:
    """SIGUSR2, which SLURM sends before the time limit, handled as a SIGTERM and recorded."""

    def __init__(self) -> None:
        self.is_reached = False
        self.requeue = signal.getsignal(signal.SIGUSR2)

    def install(self) -> None:
        """Replace submitit's handler."""
        signal.signal(signal.SIGUSR2, self._stop)

    def requeue_job(self) -> None:
        """Let submitit's handler requeue the job."""
        if callable(self.requeue):
            self.requeue(signal.SIGUSR2, None)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.is_reached = True
        signal.raise_signal(signal.SIGTERM)


@dataclass(frozen=True)
class SlurmCell:
    """Callable that submitit runs in the job; `folder` contains the config.yaml of the cell."""

    folder: Path
    target: str
    smoke: bool
    limits: Limits

    def __call__(self) -> None:
        """Run the cell. Raises RuntimeError if it has no result, unless the job is requeued."""
        job = Job(Cell.read(self.folder / "config.yaml"), self.folder)
        limit = TimeLimit()
        os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        if int(os.environ.get("SLURM_NNODES", "1")) > 1:
            run_rank(job, self.target, self.smoke, limit)
            return
        # SLURM signals every process of a job, so the fork server must ignore SIGUSR2 from the
        # beginning.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        slots = make_slots(1)
        slots.check([job.cell])
        launcher = Launcher(self.target, self.smoke)
        forkserver.ensure_running()
        limit.install()
        summary = Runner(launcher, slots, Display(sys.stdout), self.limits).run([job])
        if job.state() == "done":
            return
        if limit.is_reached:
            self._record_time_out()
            limit.requeue_job()
        messages = [outcome.message for outcome in summary.outcomes]
        raise RuntimeError(f"{job.name}: {messages[-1] if messages else 'stopped before it began'}")

    def _record_time_out(self) -> None:
        """Correct the failure class, because the runner has only seen a SIGTERM."""
        attempts = folder.list_attempts(self.folder)
        if attempts and (end := folder.read_exit(attempts[-1])) is not None:
            changes = {"failure": "timed-out", "message": "the time limit of its job was reached"}
            end.model_copy(update=changes).write(attempts[-1] / "exit.json")

    def checkpoint(self) -> "DelayedSubmission":
        """Return what submitit requeues: the same call, which resumes from the checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def run_rank(job: Job, target: str, smoke: bool, limit: TimeLimit) -> None:
    """Train as this task's rank of a cell that spans several nodes.

    Every task of the job is a rank in a process of its own. Rank 0 holds the cell's lock and writes
    its records. There is no runner: SLURM's time limit is the only limit, and SLURM ends all ranks
    if one fails. Raises what training raises; rank 0 records it first.
    """
    os.environ[ACROSS_NODES] = "1"
    limit.install()
    train = load(target)
    if os.environ["SLURM_PROCID"] != "0":
        try:
            train(job.folder, smoke=smoke)
        except Preempted:
            # Raised again, it would make SLURM end rank 0 before rank 0 has written the record.
            print(traceback.format_exc())
        return
    # A previous job that died on another node holds the lock for some minutes.
    while job.state() == "running":
        time.sleep(HEARTBEAT)
    with hold_lock(job.folder):
        attempt = folder.create_attempt(job.folder)
        redirect_output(attempt / folder.log_name(0))
        faulthandler.enable()
        try:
            train(job.folder, smoke=smoke)
        except BaseException as error:
            text = traceback.format_exc()
            print(text, flush=True)
            failure.describe_end(1, text).write(attempt / "exit.json")
            if not (isinstance(error, Preempted) and limit.is_reached):
                raise
    if limit.is_reached and job.state() != "done":
        limit.requeue_job()
