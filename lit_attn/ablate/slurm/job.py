"""The inside of a SLURM job: a runner of one cell, so what holds on one machine holds here.

SLURM takes a job back in two ways. It sends SIGTERM where it will queue the job again by itself
(preemption) or not at all (scancel): the cell saves, and the job ends. It sends SIGUSR2 where the
time is up: the cell saves, and submitit queues the job again, within the number of timeouts that
the study allows.
"""

import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lit_attn.ablate.display import Lines
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.plan import Job
from lit_attn.ablate.runner import Limits, Runner
from lit_attn.ablate.slots import make_slots
from lit_attn.ablate.slurm import multi_node
from lit_attn.cells import folder
from lit_attn.config.cell import Cell

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission


@dataclass(frozen=True)
class SlurmCell:
    """What submitit calls in the job; `folder` holds the cell's config.yaml."""

    folder: Path
    target: str
    smoke: bool
    limits: Limits

    def __call__(self) -> None:
        """Run the cell. Without a result the job fails, or is queued again when out of time."""
        job = Job(Cell.read(self.folder / "config.yaml"), self.folder)
        if int(os.environ.get("SLURM_NNODES", "1")) > 1:
            multi_node.run(job, self.target, self.smoke)
            return
        requeue = signal.getsignal(signal.SIGUSR2)
        # SLURM signals every process of a job: the server must have learnt to ignore this one.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        slots = make_slots(1)
        slots.check([job.cell])
        launcher = Launcher(self.target, self.smoke)
        forkserver.ensure_running()

        out_of_time = False

        def save_and_stop(number: int, frame: FrameType | None) -> None:
            nonlocal out_of_time
            out_of_time = True
            signal.raise_signal(signal.SIGTERM)

        signal.signal(signal.SIGUSR2, save_and_stop)
        summary = Runner(launcher, slots, Lines(sys.stdout), self.limits).run([job])
        if job.state() == "done":
            return
        if out_of_time:
            self._say_timed_out()
            if callable(requeue):
                requeue(signal.SIGUSR2, None)
        ends = [outcome.message for outcome in summary.outcomes]
        raise RuntimeError(f"{job.name}: {ends[-1] if ends else 'stopped before it began'}")

    def _say_timed_out(self) -> None:
        """The runner knows only that it was told to go."""
        begun = folder.list_attempts(self.folder)
        if begun and (said := folder.read_exit(begun[-1])) is not None:
            changed = {"failure": "timed-out", "message": "the time of its job was up"}
            said.model_copy(update=changed).write(begun[-1] / "exit.json")

    def checkpoint(self) -> "DelayedSubmission":
        """What submitit queues again: the same, for the cell goes on from its checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
