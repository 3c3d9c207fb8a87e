"""Importing this ends the process when its parent ends, however the parent ends (Linux).

The fork server preloads it, so that a killed runner takes the server with it; every cell calls
`die_with_parent` itself, so that the server takes the cells with it. The kernel does it, so it also
holds for `kill -9`.

Nothing else ends the server: a signal to the runner's whole group (a closed terminal, `timeout`, a
scheduler) is the runner's to answer, while the cells write their last checkpoints.
"""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL at the parent's end; elsewhere than on Linux do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def answer_signals() -> None:
    """Undo in a cell what the server has told it to ignore; only SIGUSR2 stays the runner's."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


die_with_parent()
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
