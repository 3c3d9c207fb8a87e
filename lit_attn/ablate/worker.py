"""The inside of a cell's process: forked from the server that has torch loaded, alone in its group.

It holds the cell's lock, writes its output to `attempts/<k>/log.txt`, and calls the target.
"""

import faulthandler
import importlib
import os
import sys
from pathlib import Path

from lit_attn.ablate.folder import new_attempt, result
from lit_attn.ablate.lock import Held, hold

BUSY = 75
"""Exit code of a cell that another process holds (EX_TEMPFAIL of sysexits.h)."""


def run(folder: Path, identity: str, target: str, smoke: bool, gpu: str | None) -> None:
    """Run `target` (`module:function`, called with the folder and `smoke`) in this process.

    `gpu` is what CUDA may see; None leaves that as it is. Another runner may have finished the cell
    since this one was planned: then there is nothing to do.
    """
    # Ctrl-C goes to the terminal's group, and a cell finishes when the runner drains.
    os.setsid()
    # Not at the top: importing it would tie whoever imports this module to its parent.
    from lit_attn.ablate.tether import answer_signals, die_with_parent

    die_with_parent()
    answer_signals()
    try:
        with hold(folder):
            if result(folder, identity) is not None:
                return
            _redirect(new_attempt(folder) / "log.txt")
            # A crash in native code, and a runner that gives up a hang, leave every thread's stack.
            faulthandler.enable()
            if gpu is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = gpu
            module, _, function = target.partition(":")
            getattr(importlib.import_module(module), function)(folder, smoke=smoke)
    except Held:
        sys.exit(BUSY)


def _redirect(log: Path) -> None:
    """Standard output and error to `log`, for this process and all that it starts."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
