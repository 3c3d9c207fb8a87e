"""The processes of a cell on several devices: started together, ended together.

They are forked from the process that holds the cell's lock, which trains nothing itself. Nobody's
command line is executed again, and there is no port that two cells could both choose: the processes
find each other through a file, in a folder made for this attempt.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from lit_attn.cells import failure
from lit_attn.cells.folder import log_name, read_log_tail

RENDEZVOUS = "LIT_ATTN_RENDEZVOUS"
"""In a rank's environment, beside LOCAL_RANK and WORLD_SIZE: the file where they meet."""
ACROSS_NODES = "LIT_ATTN_ACROSS_NODES"
"""Set where SLURM has started the ranks, one for each of its tasks."""
SETTLE = 3.0
"""Seconds that the others have to end, once one has failed."""


class StartMessage(NamedTuple):
    """What the ranks wait for: where they meet, and where their logs go."""

    rendezvous: str
    attempt: Path | None


class RankProcesses:
    """Processes that wait for `run`, to call what they were made for."""

    def __init__(self, processes: list[ForkProcess], pipes: list[Connection]) -> None:
        self.processes = processes
        self.pipes = pipes

    def run(self, attempt: Path | None) -> int:
        """Let them go and wait for them; 0, or the exit code of the first that failed.

        Their logs lie in `attempt` (see `log_name`), and behind rank 0's, where this process writes
        too, stands the end of the rank that failed. Without an attempt, all write as this one does.
        """
        before = signal.signal(signal.SIGTERM, self._pass_on)
        # A runner that gives up a hang sends it to all; they leave their stacks, and end.
        signal.signal(signal.SIGABRT, signal.SIG_IGN)
        with _folder() as store:
            try:
                for pipe in self.pipes:
                    # One that was told to stop before this has ended already, and failed so.
                    with contextlib.suppress(BrokenPipeError):
                        pipe.send(StartMessage(f"{store}/rendezvous", attempt))
                ended = self._wait()
            finally:
                signal.signal(signal.SIGTERM, before)
        failed = [(rank, code) for rank, code in ended if code]
        if not failed:
            return 0
        tails = {
            rank: "" if attempt is None else read_log_tail(attempt, rank) for rank, _ in failed
        }
        first, code = next(
            ((rank, code) for rank, code in failed if not failure.is_echo(code, tails[rank])),
            failed[0],
        )
        if attempt is not None and first:
            print(failure.quote_rank_log(first, code, tails[first]), file=sys.stderr, flush=True)
        return 128 - code if code < 0 else code

    def end(self) -> None:
        """End what is left of them."""
        for process in self.processes:
            process.kill()
            process.join()

    def _wait(self) -> list[tuple[int, int]]:
        """The ranks that ended by themselves, in that order, and their exit codes.

        Once one has failed, those that do not follow it within SETTLE are ended.
        """
        ended: list[tuple[int, int]] = []
        left = dict(enumerate(self.processes))
        deadline = None
        while left:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not wait([process.sentinel for process in left.values()], timeout):
                self.end()
                break
            for rank in [rank for rank, process in left.items() if process.exitcode is not None]:
                code = left.pop(rank).exitcode
                assert code is not None
                ended.append((rank, code))
                if code and deadline is None:
                    deadline = time.monotonic() + SETTLE
        return ended

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """To the ranks as well, where only this process was told."""
        for process in self.processes:
            if process.is_alive():
                process.terminate()


@contextlib.contextmanager
def fork_ranks(count: int, body: Callable[[], object]) -> Iterator[RankProcesses]:
    """`count` processes that will call `body` with LOCAL_RANK, WORLD_SIZE and RENDEZVOUS set.

    Enter this before the cell's lock: that has a thread, and a process with threads does not fork
    well. When it is left, whichever way, none of them lives.
    """
    context = multiprocessing.get_context("fork")
    made = RankProcesses([], [])
    try:
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, count, os.getpid(), theirs, body))
            process.start()
            theirs.close()
            made.processes.append(process)
            made.pipes.append(ours)
        yield made
    finally:
        made.end()


def redirect_output(log: Path) -> None:
    """Standard output and error to `log`, for this process and all that it starts."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _rank(rank: int, count: int, parent: int, pipe: Connection, body: Callable[[], object]) -> None:
    # Not at the top: importing it would tie whoever imports this module to its parent.
    from lit_attn.cells.fork_server import die_with_parent, restore_signals

    die_with_parent()
    restore_signals()
    if os.getppid() != parent:
        # It ended before it could take this process with it.
        os._exit(1)
    go: StartMessage = pipe.recv()
    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), RENDEZVOUS: go.rendezvous}
    if go.attempt is not None:
        redirect_output(go.attempt / log_name(rank))
    faulthandler.enable()
    body()


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="lit_attn-")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
