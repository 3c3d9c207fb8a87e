"""Importing this ends the process when its parent ends, however the parent ends (Linux).

The fork server preloads it, so that a killed runner takes the server with it; every cell calls
`die_with_parent` itself, so that the server takes the cells with it. The kernel does it, so it also
holds for `kill -9`.
"""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL at the parent's end; elsewhere than on Linux do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


die_with_parent()
