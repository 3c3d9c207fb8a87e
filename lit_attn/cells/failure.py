"""Why an attempt at a cell ended without a result, from its return code and the end of its log.

Exit code 0 proves nothing: Lightning exits 0 after a non-finite loss, after SIGTERM and with an
unwritable checkpoint folder. Only a result does; these functions are asked when there is none.
"""

import re
import signal

from lit_attn.cells.records import FailureClass

# The last line of a traceback, also behind a rank's prefix and through an exception group.
EXCEPTION = re.compile(
    r"^(?:\[rank\d+\]:\s*)?(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit|Diverged|Preempted))(?::\s|$)"
)
# What the class of the failure says already.
OURS = re.compile(r"^(\[rank\d+\]:\s*)?lit_attn(?:\.\w+)+: ")
OUT_OF_MEMORY = re.compile(
    r"out ?of ?memory|MemoryError|can't allocate memory|cannot allocate memory|unable to allocate"
    r"|ALLOC_FAILED",
    re.IGNORECASE,
)
NO_SPACE = re.compile(r"no space left on device|errno 28\b|disk quota exceeded", re.IGNORECASE)

# What a rank says when another one has gone.
ECHO = re.compile(
    r"(closed|reset) by peer|broken pipe|ncclRemoteError|ncclSystemError|socket timeout"
    r"|connection refused",
    re.IGNORECASE,
)
# Stands in a cell's log before the end of the log of the rank that failed first.
FIRST = "rank {} was the first to fail: "
QUOTED = re.compile(FIRST.format(r"(\d+)") + "(.*)")
QUOTED_LINES = 40

# A process told to go, whether by us, a scheduler or the kernel's out-of-memory killer.
TOLD_TO_GO = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
OUT_OF_TIME = {signal.SIGXCPU, signal.SIGALRM}
LOST = 255
"""What multiprocessing reports of a process whose fork server is gone, and the process with it."""
DISK_FULL = 74
"""Exit code of a cell that found no room on a disk, maybe not even for its log (EX_IOERR of
sysexits.h)."""


class Diverged(RuntimeError):
    """Non-finite loss. The optimiser step that would have used it was not made."""


class Preempted(RuntimeError):
    """Stop after SIGTERM. The cell has written a checkpoint."""


def classify_failure(returncode: int, tail: str) -> FailureClass:
    """The class of a failure: `returncode` as a process has it (-9 for SIGKILL, or a shell's 137),
    `tail` the last lines of its log."""
    tail = _of_the_first(tail)
    received = signal_of_code(returncode)
    if received in OUT_OF_TIME:
        return "timed-out"
    if received in TOLD_TO_GO:
        return "killed"
    if returncode == DISK_FULL:
        # Whatever stands in the log, which may have had room for half of the line that says so.
        return "no-space"
    line = _exception(tail)
    if line is None:
        if returncode == LOST or (returncode == 0 and "SIGTERM" in tail):
            return "killed"
        if returncode == 0:
            return "error"
        line = tail
    name = match[1] if (match := EXCEPTION.match(line)) else ""
    if name == "Diverged":
        return "diverged"
    if name == "ConfigError":
        return "bad-configuration"
    if name in ("Preempted", "SIGTERMException", "KeyboardInterrupt"):
        return "killed"
    if name == "TimeoutError":
        return "timed-out"
    if NO_SPACE.search(line):
        return "no-space"
    return "out-of-memory" if OUT_OF_MEMORY.search(line) else "error"


def describe_failure(returncode: int, tail: str) -> str:
    """The one line that says why."""
    tail = _of_the_first(tail)
    received = signal_of_code(returncode)
    if line := _exception(tail):
        return OURS.sub(r"\1", line)
    if received is not None:
        return f"ended by {received.name}"
    if returncode == LOST:
        return "ended with the server that it was forked from"
    if returncode == DISK_FULL:
        return "no space left on device"
    last = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "")
    said = f"; its log ends: {last}" if last else ""
    return f"exit code {returncode} without a result{said}"


def first_failed_rank(tail: str) -> int:
    """The rank that failed first, as the log of a cell on several devices says."""
    found = QUOTED.findall(tail)
    return int(found[-1][0]) if found else 0


def is_echo(returncode: int, tail: str) -> bool:
    """Whether a rank failed only because another one did."""
    line = _exception(tail)
    return returncode > 0 and line is not None and ECHO.search(line) is not None


def quote_rank_log(rank: int, returncode: int, tail: str) -> str:
    """What stands in the cell's log of the rank that failed first."""
    lines = [f"[rank{rank}]: {line}" for line in tail.splitlines()[-QUOTED_LINES:]]
    return "\n".join([FIRST.format(rank) + describe_failure(returncode, tail), *lines])


def signal_of_code(returncode: int) -> signal.Signals | None:
    """The signal that a return code speaks of, or None."""
    number = -returncode if returncode < 0 else returncode - 128
    return signal.Signals(number) if number in signal.valid_signals() else None


def _of_the_first(tail: str) -> str:
    """Of a cell's log the part on the rank that failed first; all of it where there is none."""
    found = list(QUOTED.finditer(tail))
    return tail[found[-1].start() :] if found else tail


def _exception(tail: str) -> str | None:
    """The last line of `tail` that ends a traceback."""
    for line in reversed(tail.splitlines()):
        if EXCEPTION.match(line):
            return line.strip()
    return None
