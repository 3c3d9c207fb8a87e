"""Why an attempt ended without a result: its failure class, from its return code and its log.

Exit code 0 proves nothing. Lightning exits 0 after a non-finite loss, after SIGTERM and with an
unwritable checkpoint folder. Only a result marks success; these functions classify the rest.
"""

import re
import signal

from lit_attn.cells.records import Exit, FailureClass

# The last line of a traceback, also with a rank's prefix and within an exception group.
EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]:\s*)?(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit|Pool|Diverged|Preempted))(?::\s|$)"
)
EXCEPTION_CLASSES: dict[str, FailureClass] = {
    "Diverged": "diverged",
    "ConfigError": "bad-configuration",
    "TimeoutError": "timed-out",
    "Preempted": "killed",
    "SIGTERMException": "killed",
    "KeyboardInterrupt": "killed",
}
# The name of this package's exceptions is left out: the failure class says the same.
OWN_EXCEPTION = re.compile(r"^(\[rank\d+\]:\s*)?lit_attn(?:\.\w+)+: ")
OUT_OF_MEMORY = re.compile(
    r"(?i)out ?of ?memory|MemoryError|can(not|'t) allocate memory|unable to allocate|ALLOC_FAILED"
)
NO_SPACE = re.compile(r"no space left on device|errno 28\b|disk quota exceeded", re.IGNORECASE)

# The end of a process that reads data for a cell; torch reports it in the process that trains. The
# line with the signal is not always the last one of the traceback.
WORKER = r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) "
LOST_WORKER = re.compile(WORKER + r"(?:is killed by signal|exited unexpectedly)|BrokenProcessPool")
WORKER_SIGNAL = re.compile(WORKER + r"is killed by signal: ([A-Z][\w ]*)")
WORKER_CODE = re.compile(WORKER + r"exited unexpectedly with exit code")
FULL_SHARED_MEMORY = signal.strsignal(signal.SIGBUS)

# The messages of a rank whose peer has ended.
LOST_PEER = re.compile(
    r"(?i)(closed|reset) by peer|broken pipe|nccl(Remote|System)Error|socket timeout"
    r"|connection refused"
)
# The line of a cell's log before the end of the log of the rank that failed first.
FIRST_FAILED = "rank {} was the first to fail: "
QUOTED = re.compile(FIRST_FAILED.format(r"(\d+)(?: on (\S+))?") + "(.*)")
QUOTED_LINES = 40
CRASH_LINES = 10  # Last lines of a log in which the cause of a crash in native code is searched.

STOP_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
"""Signals of the runner, a scheduler or the kernel's out-of-memory killer."""
TIME_LIMIT_SIGNALS = {signal.SIGXCPU, signal.SIGALRM}
LOST_SERVER = 255
"""Exit code in multiprocessing of a process whose fork server has ended. No cell exits with it."""
LOST_NODE = 68  # Exit code of a cell that has lost a node of its SLURM job (EX_NOHOST).
DISK_FULL = 74  # Exit code of a cell on a full disk, perhaps without a log (EX_IOERR).


class Diverged(RuntimeError):
    """Non-finite loss. The optimiser step that would have used it was not made."""


class Preempted(RuntimeError):
    """Stop after SIGTERM. The cell has written a checkpoint."""


def classify_failure(returncode: int, tail: str) -> FailureClass:
    """Return the class of a failure.

    `returncode` is that of a process (-9 for SIGKILL) or a shell (137), `tail` the end of the log.
    """
    tail = _first_failed_part(tail)
    received = signal_of_code(returncode)
    if received in TIME_LIMIT_SIGNALS:
        return "timed-out"
    if received in STOP_SIGNALS:
        return "killed"
    if returncode == DISK_FULL:
        # The log may have had room for only half of the line with the reason.
        return "no-space"
    if returncode in (LOST_SERVER, LOST_NODE):
        return "killed"
    if received is not None:
        # A crash in native code. An exception in the log is older, and was not the end.
        line: str | None = "\n".join(tail.splitlines()[-CRASH_LINES:])
    else:
        line = _last_exception(tail)
    if line is None:
        if returncode == 0:
            return "killed" if "SIGTERM" in tail else "error"
        line = tail
    if received is None:
        match = EXCEPTION.match(line)
        if match is not None and match[1] in EXCEPTION_CLASSES:
            return EXCEPTION_CLASSES[match[1]]
        if LOST_WORKER.search(line):
            return _classify_worker(tail)
    if NO_SPACE.search(line):
        return "no-space"
    if OUT_OF_MEMORY.search(line):
        return "out-of-memory"
    return "error"


def describe_failure(returncode: int, tail: str) -> str:
    """Return one line with the reason of a failure."""
    tail = _first_failed_part(tail)
    received = signal_of_code(returncode)
    line = _last_exception(tail)
    if line and received in STOP_SIGNALS and _names_preemption(line):
        # The cell had saved and was about to exit: schedulers repeat their signal.
        return OWN_EXCEPTION.sub(r"\1", line)
    if received is not None:
        return f"ended by {received.name} after {line}" if line else f"ended by {received.name}"
    if returncode == LOST_SERVER:
        return "ended with the server that it was forked from"
    if returncode == LOST_NODE:
        return tail.strip().rpartition("\n")[2]
    if line:
        return OWN_EXCEPTION.sub(r"\1", line) + _worker_detail(line, tail)
    if returncode == DISK_FULL:
        return "no space left on device"
    message = f"exit code {returncode} without a result"
    written_lines = [line.strip() for line in tail.splitlines() if line.strip()]
    if written_lines:
        message += f"; its log ends: {written_lines[-1]}"
    return message


def _names_preemption(line: str) -> bool:
    """Return True if `line`, the last one of a traceback, names Preempted."""
    match = EXCEPTION.match(line)
    return match is not None and match[1] == Preempted.__name__


def _worker_detail(line: str, tail: str) -> str:
    """Return the signal that ended a process that reads data, unless `line` names it, or ""."""
    if not LOST_WORKER.search(line) or WORKER_SIGNAL.search(line):
        return ""
    signals = WORKER_SIGNAL.findall(tail)
    return f" (signal: {signals[-1]})" if signals else ""


MEMORY_ADVICE = (
    "run fewer cells at once (--jobs), make data.batch_size smaller, or write"
    " training.recompute: blocks"
)
"""Advice about a cell that ran out of memory."""


def describe_end(returncode: int, tail: str, overdue: str = "") -> Exit:
    """Return the record of an attempt without a result; `overdue` names a limit it exceeded."""
    rank = first_failed_rank(tail)
    if overdue:
        kind: FailureClass = "timed-out"
        message = overdue
    else:
        kind = classify_failure(returncode, tail)
        message = describe_failure(returncode, tail)
        node = first_failed_node(tail)
        if node:
            message += f" (rank {rank} on {node})"
    return Exit(failure=kind, returncode=returncode, message=message, rank=rank)


def first_failed_rank(tail: str) -> int:
    """Return the rank that failed first, read from the log of a cell on several devices."""
    quotes = QUOTED.findall(tail)
    return int(quotes[-1][0]) if quotes else 0


def first_failed_node(tail: str) -> str:
    """Return the node of the rank that failed first, or "" for a cell on one node."""
    quotes = QUOTED.findall(tail)
    return quotes[-1][1] if quotes else ""


def is_echo(returncode: int, tail: str) -> bool:
    """Return True if this rank failed only because another rank failed first."""
    line = _last_exception(tail)
    return returncode > 0 and line is not None and LOST_PEER.search(line) is not None


def quote_rank_log(rank: int, returncode: int, tail: str, node: str = "") -> str:
    """Return what the cell's log says about the rank that failed first, on `node`."""
    name = f"{rank} on {node}" if node else str(rank)
    lines = [FIRST_FAILED.format(name) + describe_failure(returncode, tail)]
    lines += [f"[rank{rank}]: {line}" for line in tail.splitlines()[-QUOTED_LINES:]]
    return "\n".join(lines)


def signal_of_code(returncode: int) -> signal.Signals | None:
    """Return the signal that ended a process with this return code, or None."""
    number = -returncode if returncode < 0 else returncode - 128
    return signal.Signals(number) if number in signal.valid_signals() else None


def _first_failed_part(tail: str) -> str:
    """Return the part of the log about the first failed rank, or the whole log."""
    quotes = list(QUOTED.finditer(tail))
    if not quotes:
        return tail
    return tail[quotes[-1].start() :]


def _classify_worker(tail: str) -> FailureClass:
    """Return the class of a failure after the end of a process that reads data.

    Exceptions of such a process are raised in the cell. A process that ends without one was killed,
    probably by the kernel's out-of-memory killer, or has crashed; another attempt may succeed.
    """
    signals = WORKER_SIGNAL.findall(tail)
    if signals and signals[-1] == FULL_SHARED_MEMORY:
        return "out-of-memory"
    if not signals and WORKER_CODE.search(tail):
        return "error"
    return "killed"


def _last_exception(tail: str) -> str | None:
    """Return the last line of `tail` that ends a traceback."""
    for line in reversed(tail.splitlines()):
        if EXCEPTION.match(line):
            return line.strip()
    return None
