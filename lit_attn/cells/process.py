"""Output and signals of a process, and its end with its parent (Linux)."""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1

BLOCKED = (signal.SIGTERM, signal.SIGHUP)
"""Signals that the fork server blocks, so that a cell which starts sees them later."""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel for signal `number` when the parent ends (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def restore_signals() -> None:
    """Restore the default handlers but SIGUSR2's, and deliver the signals blocked so far."""
    for number in BLOCKED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)


def redirect_output(log: Path) -> None:
    """Redirect stdout and stderr of this process, and of all processes it starts, to `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
