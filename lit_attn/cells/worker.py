"""The process of a cell, forked from the server that has torch loaded, in a session of its own.

It holds the cell's lock, writes its output to `attempts/<k>/log.txt`, and forks the ranks, which
call the target. User code runs only in the ranks: nothing that it does ends the fork server.
"""

import contextlib
import errno
import importlib
import os
import sys
import traceback
from pathlib import Path

from lit_attn.cells.failure import DISK_FULL
from lit_attn.cells.folder import create_attempt, final_failure_since, read_result
from lit_attn.cells.lock import CellLocked, LockError, ProcessIdentity, hold_lock
from lit_attn.cells.ranks import END_SIGNAL, fork_ranks, leave_no_process, redirect_output

BUSY = 75
"""Exit code of a cell that another process holds (EX_TEMPFAIL of sysexits.h)."""


def run(
    folder: Path,
    identity: str,
    target: str,
    smoke: bool,
    gpus: tuple[str, ...] | None,
    devices: int,
    attempt_count: int,
    runner: ProcessIdentity,
) -> None:
    """Run `target` (`module:function`, called with the folder and `smoke`) on `devices` ranks.

    CUDA sees only `gpus`; None changes nothing. Returns at once if another runner has finished the
    cell meanwhile. Exits with BUSY if another process runs it, or if it has failed for good after
    the first `attempt_count` attempts. `runner` releases the cell's lock.
    """
    # Ctrl-C goes to the terminal's process group. A cell must finish while the runner drains.
    os.setsid()
    # Imported here because importing this module ties the importing process to its parent.
    from lit_attn.cells.fork_server import die_with_parent, restore_signals

    folder = folder.absolute()
    restore_signals()
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

    def train() -> None:
        module, _, function = target.partition(":")
        getattr(importlib.import_module(module), function)(folder, smoke=smoke)

    try:
        with leave_no_process():
            die_with_parent(END_SIGNAL)
            if runner.is_alive() is False:
                # The runner and the server ended before `die_with_parent` could take effect.
                sys.exit(BUSY)
            with fork_ranks(devices, train) as ranks, hold_lock(folder, runner):
                if read_result(folder, identity) is not None:
                    return
                if final_failure_since(folder, attempt_count) is not None:
                    sys.exit(BUSY)
                attempt = create_attempt(folder)
                redirect_output(attempt / "log.txt")
                if code := ranks.run(attempt):
                    sys.exit(code)
    except CellLocked:
        sys.exit(BUSY)
    except LockError:
        # The runner reads the reason from the log.
        redirect_output(create_attempt(folder) / "log.txt")
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # There may be no room for a log with the reason.
        with contextlib.suppress(OSError):
            traceback.print_exc()
        sys.exit(DISK_FULL)
