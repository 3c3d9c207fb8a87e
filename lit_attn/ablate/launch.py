"""Cells as processes of this machine, forked from a server that has imported torch."""

import contextlib
import functools
import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING

from lit_attn import train
from lit_attn.ablate.display import write_line
from lit_attn.ablate.job import Job
from lit_attn.ablate.model_check import check_variants, find_variants, list_untried
from lit_attn.ablate.signals import block_interrupts
from lit_attn.ablate.slots import Slot, Slots, count_cores, make_slots
from lit_attn.cells import folder, lock, ranks
from lit_attn.cells.inputs import change_finder
from lit_attn.files import write_atomic
from lit_attn.schema import mistakes
from lit_attn.schema.errors import plural
from lit_attn.schema.sources import PACKAGE
from lit_attn.temporary import temporary_folder

if TYPE_CHECKING:
    from lit_attn.ablate.plan import Matrix

# Modules that the fork server imports once for all cells. mmsegmentation is not one of them: it is
# optional, and would cost the server of every run 0.4 s of CPU and 60 MB (2026-11-21).
TRAINING = [
    "lit_attn.training.fit",
    "lit_attn.training.first_step",
    # Configurations of tasks load their Lightning modules by name, so nothing else imports them.
    "lit_attn.tasks.classification",
    "lit_attn.tasks.language",
    "sklearn.datasets",
    "sklearn.model_selection",
    "torch.utils.tensorboard",
]
SOCKET_FOLDER = "/dev/shm"
"""Folder of the fork server's socket, if it exists. The path of a socket has at most 107
characters, and TMPDIR may be longer or may be cleaned while cells run."""


class CellProcess:
    """The process of a cell, which leads a process group of its own.

    `kill_at` is the time of SIGKILL after `stop`; `overdue` names the limit that was exceeded.
    """

    def __init__(self, job: Job, slot: Slot, process: ForkServerProcess) -> None:
        self.job = job
        self.slot = slot
        self.process = process
        self.started = time.monotonic()
        self.last_step = self.started
        self.progress_mtime = folder.progress_mtime(job.folder)
        self.kill_at: float | None = None
        self.overdue = ""
        self.is_killed = False

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def idle_seconds(self) -> float:
        """Return the seconds since the last step or the start, by this machine's own clock."""
        mtime = folder.progress_mtime(self.job.folder)
        if mtime != self.progress_mtime:
            self.progress_mtime = mtime
            self.last_step = time.monotonic()
        return time.monotonic() - self.last_step

    def stop(self, number: signal.Signals, grace: float, overdue: str = "") -> None:
        """Send a signal, and set the time after which the process may be killed."""
        self.kill_at = time.monotonic() + grace
        self.overdue = overdue
        self.signal(number)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the cell's process group.

        The first SIGKILL goes to the cell's first process as END_SIGNAL. It kills every process
        that the cell has started, also those outside the group.
        """
        assert self.process.pid is not None
        if number == signal.SIGKILL and not self.is_killed:
            self.is_killed = True
            if self.process.exitcode is None:
                os.kill(self.process.pid, ranks.END_SIGNAL)
            return
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            # The process creates its group first of all; until then there is only the process.
            with contextlib.suppress(ProcessLookupError):
                if self.process.exitcode is None:
                    os.kill(self.process.pid, number)

    def end(self) -> int:
        """Collect the process after its end, kill what it left behind, and return its exit code."""
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.close()
        return code


def list_preloads(module: str) -> list[str]:
    """Return the modules that a server imports whose cells run a function of `module`."""
    # cells.fork_server comes first: it ends the server with its runner, also during the other
    # imports. The command line is listed because every child imports the main module.
    names = ["lit_attn.cells.fork_server", "lit_attn.cells.ranks", "lit_attn.ablate.__main__"]
    # Every cell reads its configuration, which imports torch.
    names += ["lit_attn.config.cell", module]
    # A server lives as long as its runner, so that of a measurement serves the later cells too.
    # The functions outside the package are those of tests, which train nothing.
    if module.partition(".")[0] == PACKAGE.name:
        names += TRAINING
    return names


class Launcher:
    """Starts cells, which run `target` (`module:function`), as forks of a server with torch."""

    def __init__(self, target: str, smoke: bool = False) -> None:
        self.target = target
        self.smoke = smoke
        self.context = multiprocessing.get_context("forkserver")
        self.module = target.partition(":")[0]
        self.checked: set[tuple[str, str]] = set()
        self.context.set_forkserver_preload(list_preloads(self.module))

    def share_cores(self, processes: int) -> None:
        """Give each of `processes` an equal share of the cores, unless the user set a number.

        OpenMP libraries read the number when they are loaded, so this comes before the first cell.
        """
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // processes)))

    def start(self, job: Job, slot: Slot, known_attempts: int) -> CellProcess:
        """Fork the process of a cell. The first call waits for the imports of the server.

        The cell ends at once if an attempt after the first `known_attempts` has failed for good.
        The caller releases the cell's lock. Raises ConnectionError if the server ends meanwhile
        (the next call starts a new one), and OSError if the process cannot be created.
        """
        arguments = (
            job.folder,
            job.identity,
            self.target,
            self.smoke,
            slot.gpus,
            len(slot.devices),
            slot.can_be_shared,
            known_attempts,
            lock.current_process(),
        )
        process = self.context.Process(target=ranks.run_cell_process, args=arguments, name=job.name)
        start_server()
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise ConnectionError("the fork server has ended") from error
        return CellProcess(job, slot, process)

    def require_cells(
        self, matrices: list["Matrix"], jobs: list[Job], limit: int | None, is_local: bool
    ) -> None:
        """Raise ConfigError with the responsible line if the model or data of a job cannot be used.

        Another process checks one cell of each new variant (see lit_attn.ablate.model_check) and
        sends the warnings of the data, which are written here. If it dies, a warning says so, and
        the logs of the cells will show why. A variant with a result of the present code makes no
        step. Cells that are not `is_local` need no server here.
        """
        variants = []
        for study, variant, job in find_variants(matrices, jobs):
            if (study, variant.name) not in self.checked:
                variants.append((study, variant, job))
                self.checked.add((study, variant.name))
        if self.module != train.__name__ or not variants:
            return
        write_line(f"checking the models and data of {plural(len(variants), 'variant')}")
        # The imports of the server go on during the next lines.
        slots = self._start_server_for(jobs, limit) if is_local else None
        configs = [job.config for _, _, job in variants]
        names = [variant.name for _, variant, _ in variants]
        proven = find_proven(matrices)
        is_proven = [(study, variant.name) in proven for study, variant, _ in variants]
        untried = list_untried(configs, is_proven)
        selects_of = {matrix.name: matrix.selects for matrix in matrices}
        selects = {number: selects_of[job.study] for number, (_, _, job) in enumerate(variants)}
        if slots is None:
            spawn = multiprocessing.get_context("spawn").Process
            check = check_variants(spawn, configs, names, is_local, untried, selects)
        else:
            fork = self.context.Process
            gpu = slots.devices[0]
            check = check_variants(fork, configs, names, is_local, untried, selects, gpu)
        for warning in check.warnings:
            write_line(f"warning: {warning}")
        if check.mistake is not None:
            index, message, traceback, is_own = check.mistake
            study, variant, _ = variants[index]
            if traceback:
                file = matrices[0].folder.parent / "first-step.log"
                write_atomic(file, traceback)
                message += f"; {file} has the traceback"
            error = variant.error(study, message)
            if is_own:
                # The process of the check has described it.
                mistakes.DESCRIBED.append(error)
            raise error

    def _start_server_for(self, jobs: list[Job], limit: int | None) -> Slots:
        """Start the server with each cell's share of the cores, and return the slots."""
        slots = make_slots(limit)
        self.share_cores(slots.processes_at_once(jobs))
        start_server()
        return slots


def find_proven(matrices: list["Matrix"]) -> set[tuple[str, str]]:
    """Return the (study, variant) that have a result which the present code and data would give."""
    find_change = change_finder()
    proven = set()
    for matrix in matrices:
        for job in (*matrix.early_jobs, *matrix.jobs):
            key = (matrix.name, job.variant.partition("@")[0])
            if key in proven:
                continue
            result = folder.read_result(job.folder, job.identity)
            if result is not None and not find_change(result):
                proven.add(key)
    return proven


@functools.cache
def _choose_socket_folder() -> None:
    """Let multiprocessing put its sockets into a folder that the next runner removes after a kill.

    multiprocessing keeps its first folder. On a full disk it creates one in TMPDIR later.
    """
    if not os.access(SOCKET_FOLDER, os.W_OK | os.X_OK):
        return
    previous = tempfile.tempdir
    folder = contextlib.ExitStack()
    with contextlib.suppress(OSError):
        tempfile.tempdir = str(folder.enter_context(temporary_folder(Path(SOCKET_FOLDER))))
        util.get_temp_dir()
    tempfile.tempdir = previous
    # multiprocessing removes its own folder with the priority -100, which comes first.
    util.Finalize(None, folder.close, exitpriority=-101)


def start_server() -> None:
    """Start the fork server if needed."""
    _choose_socket_folder()
    with block_interrupts():
        forkserver.ensure_running()
