"""Folders that tests of one module share, filled once for all processes of pytest."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def make_once(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]) -> Path:
    """Return the temporary folder `name` after `fill` has written it.

    Processes of pytest take tests of each other's modules, and a fixture of a module runs in each
    of them. The first process that needs the folder fills it, and the others wait. Tests must not
    change it. If `fill` fails, the next process tries again.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / name
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = root / f"{name}.done"
        if not done.exists():
            folder.mkdir(exist_ok=True)
            fill(folder)
            done.touch()
    return folder
