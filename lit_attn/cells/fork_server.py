"""Importing this ends the process when its parent ends, however the parent ends (Linux).

The fork server preloads it, so that a killed runner takes the server with it; every cell calls
`die_with_parent` itself, so that the server takes the cells with it. The kernel does it, so it also
holds for `kill -9`.

Nothing else ends the server: a signal to the runner's whole group (Ctrl-C, a closed terminal,
`timeout`, a scheduler) is the runner's to answer, while the cells end or write their last
checkpoints.
"""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
HELD_BACK = (signal.SIGTERM, signal.SIGHUP)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL at the parent's end; elsewhere than on Linux do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def restore_signals() -> None:
    """Let a cell hear what the server does not, also what has come since it was forked, but for
    interrupts; only SIGUSR2 stays the runner's."""
    for number in HELD_BACK:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)


die_with_parent()
# Not ignored: a cell that is told to go while it starts would not notice.
signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
# Ignored: an interrupt from before a cell has left the terminal's group is none of its business.
# The launcher starts the server with it blocked.
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
