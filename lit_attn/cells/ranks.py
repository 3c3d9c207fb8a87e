"""The processes of a cell: one rank for each of its devices, started together and ended together.

The ranks are forked from a process that trains nothing itself: it holds the cell's lock, waits for
the ranks, and ends whatever they leave behind. There is no command line that is executed again, and
no port that two cells could both choose: the ranks meet at a file in a new temporary folder.
"""

import contextlib
import ctypes
import errno
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from lit_attn.cells import failure
from lit_attn.cells import folder as cell_folder
from lit_attn.cells.launched import RENDEZVOUS, set_ranks
from lit_attn.cells.lock import BUSY, CellLocked, LockError, ProcessIdentity, hold_lock
from lit_attn.cells.nodes import count_nodes, run_on_nodes
from lit_attn.cells.process import die_with_parent, redirect_output, restore_signals
from lit_attn.schema.base import load
from lit_attn.temporary import temporary_folder

SHARED_DEVICE = "LIT_ATTN_SHARED_DEVICE"
"""Environment variable that is set if the runner may run other cells on the GPU of this one."""
SETTLE = 3.0  # Seconds that the other ranks have to end after one has failed.
END_SIGNAL = signal.SIGRTMIN + 7
"""Signal that makes the parent of the ranks kill every process that they have started, and end."""
KILL_TIMEOUT = 5.0
"""Seconds to wait for killed processes: one that waits for a dead network disk cannot be killed."""
OOM_SCORE = 500
"""Score of a rank for the kernel's out-of-memory killer. The runner and the fork server have 0, so
the killer chooses the rank with the most memory."""
PR_SET_CHILD_SUBREAPER = 36

COMPLETE = 79
"""Exit code of a rank whose body has returned. Any other code is a failure, also 0: the code of a
cell can call sys.exit or os._exit, and the other ranks would wait for this rank in their next step.
"""

Body = Callable[[], object]


def run_ranks(count: int, body: Body, attempt: Path | None, start_heartbeat: Body) -> int:
    """Run `body` in `count` forked processes; return 0 or the exit code of the first that failed.

    A rank that ends before its body has returned has failed, also with exit code 0.
    Several have LOCAL_RANK and WORLD_SIZE set. Each rank writes its log to the folder `attempt`
    (see `log_name`); this process appends the end of the first failed rank's log to its own output.
    Without `attempt` the ranks write to the output of this process. `start_heartbeat` is called
    after the forks, because a process with threads does not fork safely.
    """
    context = multiprocessing.get_context("fork")
    processes: list[ForkProcess] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.is_alive():
                process.terminate()

    with _make_rendezvous(count) as rendezvous:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))  # Until it has a handler.
        try:
            for rank in range(count):
                arguments = (rank, count, os.getpid(), rendezvous, attempt, body)
                process = context.Process(target=_run_rank, args=arguments)
                processes.append(process)
                process.start()
            start_heartbeat()
            # Senders that know only this process reach the ranks too.
            signal.signal(signal.SIGTERM, pass_on)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
            # The runner sends SIGABRT to a cell that hangs: the ranks write their stacks and end.
            signal.signal(signal.SIGABRT, signal.SIG_IGN)
            ended = _wait_for_ranks(processes)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    failed = [end for end in ended if end.code != COMPLETE]
    if not failed:
        return 0
    first = failed[0] if attempt is None else _report_cause(failed, attempt)
    return 128 - first.code if first.code < 0 else first.code


class RankEnd(NamedTuple):
    """End of the process of a rank: its exit code, or the negative number of a signal."""

    rank: int
    code: int


@contextlib.contextmanager
def _make_rendezvous(count: int) -> Iterator[str]:
    """Yield the path of a new file where `count` ranks meet, or "" for a single one."""
    if count == 1:
        yield ""
        return
    with temporary_folder() as folder:
        yield str(folder / "rendezvous")


def _report_cause(failed: list[RankEnd], attempt: Path) -> RankEnd:
    """Return the failed rank that did not fail because of another one, and quote its log.

    The log of rank 0 is that of the cell, so it needs no quotation.
    """
    cause = failed[0]
    for end in failed:
        tail = cell_folder.read_log_tail(attempt, end.rank)
        if not failure.is_echo(end.code, tail):
            cause = end
            break
    if cause.rank != 0:
        tail = cell_folder.read_log_tail(attempt, cause.rank)
        quotation = failure.quote_rank_log(cause.rank, cause.code, tail)
        print(quotation, file=sys.stderr, flush=True)
    return cause


def _wait_for_ranks(processes: list[ForkProcess]) -> list[RankEnd]:
    """Return the ends of the ranks in their order. A failure ends the other ranks."""
    ended: list[RankEnd] = []
    running = dict(enumerate(processes))
    deadline = None
    while running:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not wait([process.sentinel for process in running.values()], timeout):
            break
        for rank, process in list(running.items()):
            code = process.exitcode
            if code is None:
                continue
            del running[rank]
            ended.append(RankEnd(rank, code))
            if code != COMPLETE and deadline is None:
                deadline = time.monotonic() + SETTLE
    return ended


@contextlib.contextmanager
def leave_no_process() -> Iterator[None]:
    """Kill every process that was started in this context when it ends, or on END_SIGNAL.

    This includes processes in their own sessions and processes whose parents have ended: the
    kernel gives the latter to this process (Linux).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def end(number: int, frame: FrameType | None) -> None:
        _kill_descendants()
        os._exit(128 + signal.SIGKILL)

    signal.signal(END_SIGNAL, end)
    try:
        yield
    finally:
        _kill_descendants()


def _run_rank(
    rank: int, count: int, parent: int, rendezvous: str, attempt: Path | None, body: Body
) -> None:
    """Run `body` in the new process of a rank, and exit with COMPLETE when it has returned."""
    die_with_parent()
    restore_signals()
    signal.signal(END_SIGNAL, signal.SIG_DFL)
    if os.getppid() != parent:
        # The parent ended before `die_with_parent` could take effect.
        os._exit(1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    if count > 1:
        set_ranks(rank, count, local_rank=rank)
        os.environ[RENDEZVOUS] = rendezvous
    if attempt is not None:
        redirect_output(attempt / cell_folder.log_name(rank))
    # A crash in native code and SIGABRT write the stack of every thread to the log.
    faulthandler.enable()
    body()
    sys.exit(COMPLETE)


def _kill_descendants() -> None:
    """Kill all children, and theirs, which then are children of this process (Linux)."""
    deadline = time.monotonic() + KILL_TIMEOUT
    while time.monotonic() < deadline:
        children: list[int] = []
        for path in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children += [int(pid) for pid in path.read_text().split()]
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def run_cell_process(
    folder: Path,
    identity: str,
    target: str,
    smoke: bool,
    gpus: tuple[str, ...] | None,
    devices: int,
    is_shared: bool,
    attempt_count: int,
    runner: ProcessIdentity,
) -> None:
    """Run `target` (`module:function`), called with the cell's folder, on `devices` ranks.

    A `smoke` run adds the argument `smoke=True`.

    This process leads a session, holds the cell's lock and writes to `attempts/<k>/log.txt`.

    CUDA sees only `gpus`; None changes nothing. `is_shared`: the runner may run other cells on them
    at the same time, which the result records. Returns at once if another runner has finished the
    cell meanwhile. Exits with BUSY if another process runs it, or if it has failed for good after
    the first `attempt_count` attempts. `runner` releases the cell's lock.
    """
    # Ctrl-C goes to the terminal's process group. A cell must finish while the runner drains.
    os.setsid()
    folder = folder.absolute()
    restore_signals()
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if is_shared:
        os.environ[SHARED_DEVICE] = "1"

    options = {"smoke": True} if smoke else {}

    def run_target() -> None:
        # Imported by the ranks: this process trains nothing.
        function = load(target)
        function(folder, **options)

    try:
        with leave_no_process():
            die_with_parent(END_SIGNAL)
            if runner.is_alive() is False:
                # The runner and the server ended before `die_with_parent` could take effect.
                sys.exit(BUSY)
            with hold_lock(folder, runner, is_beating=False) as start_heartbeat:
                if cell_folder.read_result(folder, identity) is not None:
                    return
                if cell_folder.final_failure_since(folder, attempt_count) is not None:
                    sys.exit(BUSY)
                attempt = cell_folder.create_attempt(folder)
                redirect_output(attempt / "log.txt")
                nodes = count_nodes()
                if nodes > 1:
                    program = [target, str(folder), str(attempt), json.dumps(options)]
                    code = run_on_nodes(nodes, devices, program, attempt, start_heartbeat)
                else:
                    code = run_ranks(devices, run_target, attempt, start_heartbeat)
                if code == failure.LOST_SERVER:
                    # The code of the cell may call sys.exit(-1).
                    sys.exit(1)
                if code != 0:
                    sys.exit(code)
    except CellLocked:
        sys.exit(BUSY)
    except LockError:
        # The runner reads the reason from the log.
        redirect_output(cell_folder.create_attempt(folder) / "log.txt")
        raise
    except OSError as error:
        _exit_after(error)


def _exit_after(error: OSError) -> NoReturn:
    """Print an error of the operating system, and exit with the code of a full disk or 1."""
    # There may be no room for a log with the reason.
    with contextlib.suppress(OSError):
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        sys.exit(failure.DISK_FULL)
    sys.exit(1)
