"""Cells as processes of this machine, each in a slot: some of its GPUs or of its cores."""

import contextlib
import multiprocessing
import os
import signal
import time
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess

from lit_attn.ablate.plan import Job
from lit_attn.ablate.slots import Slot, cores
from lit_attn.cells import folder, lock, worker

# What a training cell imports, loaded once by the server that all cells are forked from: the tasks,
# and what they load on demand. Not mmsegmentation, which is optional: a cell of segmentation takes
# 0.4 s of CPU and 60 MB for it (2026-11-21), and the server of every other run would.
TRAINING = [
    "lit_attn.training.fit",
    "sklearn.datasets",
    "sklearn.model_selection",
    "torch.utils.tensorboard",
]


class ServerLost(Exception):
    """The server that cells are forked from has ended before it made one."""


class Running:
    """A cell's process, the leader of a process group of its own."""

    def __init__(self, job: Job, slot: Slot, process: ForkServerProcess) -> None:
        self.job = job
        self.slot = slot
        self.process = process
        self.started = self.stepped = time.monotonic()
        self.said = folder.progress_mtime(job.folder)
        self.kill_at: float | None = None
        self.overdue = ""

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self.started

    def idle(self) -> float:
        """Seconds since it last told of a step, or since its start.

        By this machine's clock: a network disk's may differ.
        """
        if (said := folder.progress_mtime(self.job.folder)) != self.said:
            self.said, self.stepped = said, time.monotonic()
        return time.monotonic() - self.stepped

    def stop(self, number: signal.Signals, grace: float, overdue: str = "") -> None:
        """Tell it to go, and note when to kill it; `overdue` says which limit it has passed."""
        self.kill_at = time.monotonic() + grace
        self.overdue = overdue
        self.signal(number)

    def signal(self, number: signal.Signals) -> None:
        """To the whole group: a cell's own children go with it."""
        assert self.process.pid is not None
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            # The group is made by the process's first call; before that there is only the process.
            with contextlib.suppress(ProcessLookupError):
                if self.process.exitcode is None:
                    os.kill(self.process.pid, number)

    def end(self) -> int:
        """Collect a process that has ended and whatever it left behind; its return code."""
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.close()
        return code


class Launcher:
    """Starts cells: forked from a server with the heavy imports loaded, a few milliseconds each.

    `target` is `module:function`, called with a cell's folder and `smoke`.
    """

    def __init__(self, target: str, smoke: bool = False) -> None:
        self.target = target
        self.smoke = smoke
        self.context = multiprocessing.get_context("forkserver")
        module = target.partition(":")[0]
        heavy = TRAINING if module == "lit_attn.train" else []
        # The tether stands first: a runner killed during the imports takes the server with it. The
        # command line is there because multiprocessing runs the main module's top in every child.
        light = ["lit_attn.cells.fork_server", "lit_attn.cells.worker", "lit_attn.ablate.__main__"]
        self.context.set_forkserver_preload([*light, module, *heavy])

    def share_cores(self, slots: int) -> None:
        """Give each of `slots` cells its share of the cores, where the user has not.

        An OpenMP library reads this when it is loaded, so it has to be said before the first cell.
        """
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // slots)))

    def start(self, job: Job, slot: Slot, known: int) -> Running:
        """Fork the cell's process. The first call waits for the server's imports.

        The cell does not begin where an attempt after the `known` first has failed for good. Its
        lock is the caller's to release.

        Raises ServerLost where the server ends meanwhile; the next call starts another.
        """
        process = self.context.Process(
            target=worker.run,
            args=(
                job.folder,
                job.identity,
                self.target,
                self.smoke,
                slot.gpus,
                len(slot.devices),
                known,
                lock.current_process(),
            ),
            name=job.name,
        )
        _start_server()
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise ServerLost("the server that cells are forked from has ended") from error
        return Running(job, slot, process)


def _start_server() -> None:
    """Where none is running. It hears no interrupt, from its first moment on: a Ctrl-C while it
    imports is the runner's to answer."""
    # Which the server's start would do, and unblock interrupts.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
