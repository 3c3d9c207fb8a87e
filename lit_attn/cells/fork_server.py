"""Setup of the process from which cells are forked. Importing this module runs it (Linux).

The fork server imports this module first. The kernel then kills the server when the runner ends,
even by `kill -9`. Every cell calls `die_with_parent` too, so that it ends with the server.

No other signal ends the server, because cells write their last checkpoints after a signal to the
whole group (Ctrl-C, a closed terminal, `timeout`, a scheduler).

All cells of a server run the package as it was when the server started, whatever is edited or
checked out meanwhile.

The server collects no garbage: imported modules are half a million objects that stay. In its forks
these objects are frozen, so that no collector goes through them and copies their memory.
"""

import gc
import os
import signal

from lit_attn.cells.process import BLOCKED, die_with_parent
from lit_attn.schema.sources import freeze_package


def _collect_own_garbage() -> None:
    """Let the garbage collector of a fork work, but on the fork's own objects alone."""
    gc.freeze()
    gc.enable()


gc.disable()
os.register_at_fork(after_in_child=_collect_own_garbage)
die_with_parent()
# Blocked, not ignored: a cell that receives one of these signals while it starts must see it later.
signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
# Ignored: an interrupt that arrives before a cell has left the terminal's process group is not for
# the cell. The launcher starts the server with SIGINT blocked.
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
freeze_package()
