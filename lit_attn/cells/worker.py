"""The inside of a cell's process: forked from the server that has torch loaded, alone in its group.

It holds the cell's lock, writes its output to `attempts/<k>/log.txt`, and calls the target, or has
it called by one process for each of the cell's devices.
"""

import contextlib
import errno
import faulthandler
import importlib
import os
import sys
import traceback
from pathlib import Path

from lit_attn.cells.failure import DISK_FULL
from lit_attn.cells.folder import create_attempt, final_failure_since, read_result
from lit_attn.cells.lock import CellLocked, ProcessIdentity, hold_lock
from lit_attn.cells.ranks import fork_ranks, redirect_output

BUSY = 75
"""Exit code of a cell that another process holds (EX_TEMPFAIL of sysexits.h)."""


def run(
    folder: Path,
    identity: str,
    target: str,
    smoke: bool,
    gpus: tuple[str, ...] | None,
    devices: int,
    known: int,
    runner: ProcessIdentity,
) -> None:
    """Run `target` (`module:function`, called with the folder and `smoke`) in this process.

    `gpus` are what CUDA may see; None leaves that as it is. Another runner may have finished the
    cell since this one was planned: then there is nothing to do. Or it may have failed there, after
    the `known` first attempts: then `runner`, which releases the lock, is to look again.
    """
    # Ctrl-C goes to the terminal's group, and a cell finishes when the runner drains.
    os.setsid()
    # Not at the top: importing it would tie whoever imports this module to its parent.
    from lit_attn.cells.fork_server import die_with_parent, restore_signals

    die_with_parent()
    restore_signals()
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)

    def train() -> None:
        module, _, function = target.partition(":")
        getattr(importlib.import_module(module), function)(folder, smoke=smoke)

    several = fork_ranks(devices, train) if devices > 1 else contextlib.nullcontext()
    try:
        with several as processes, hold_lock(folder, runner):
            if read_result(folder, identity) is not None:
                return
            if final_failure_since(folder, known) is not None:
                sys.exit(BUSY)
            attempt = create_attempt(folder)
            redirect_output(attempt / "log.txt")
            # A crash in native code, and a runner that gives up a hang, leave every thread's stack.
            faulthandler.enable()
            if processes is None:
                train()
            elif code := processes.run(attempt):
                sys.exit(code)
    except CellLocked:
        sys.exit(BUSY)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # There may be no room for a log that says so.
        with contextlib.suppress(OSError):
            traceback.print_exc()
        sys.exit(DISK_FULL)
