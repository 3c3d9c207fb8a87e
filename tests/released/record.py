"""Record the runs of one set-up: `PYTHONPATH=tests:. python -m released.record SETUP CLONE`.

SETUP is a module of this folder with REPOSITORY, COMMIT, RUNS and `record(clone, run)`, and CLONE
a checkout of that repository. Every run has a process for itself, since released modules keep
state.
"""

import atexit
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import date
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from released.recording import Arrays

FOLDER = Path(__file__).parent / "records"


class Clone:
    """Checkout of a released repository at one commit."""

    def __init__(self, folder: Path, repository: str, commit: str) -> None:
        """Raise SystemExit if `folder` is not a clean checkout of `commit`."""
        self.folder, self.repository, self.commit = folder.resolve(), repository, commit
        head = self._git("rev-parse", "HEAD")
        if not head.startswith(commit):
            raise SystemExit(f"{folder}: is at {head[:8]}; check out {commit} of {repository}")
        if changed := self._git("diff", "--name-only", "--diff-filter=M", "HEAD"):
            raise SystemExit(f"{folder}: has local edits: {changed.splitlines()[0]}")

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def source(self, path: str, replacements: Mapping[str, str]) -> str:
        """Return the text of a file after `replacements`, each of which must match exactly once.

        The text comes from the commit itself, so local edits of the checkout have no effect.
        """
        text = self._git("show", f"{self.commit}:{path}")
        for old, new in replacements.items():
            if (count := text.count(old)) != 1:
                raise SystemExit(f"{path}: {old!r} occurs {count} times, not once")
            text = text.replace(old, new)
        return text

    def run(self, path: str, replacements: Mapping[str, str], names: dict[str, Any]) -> None:
        """Execute a file of the checkout as a script, with `names` as additional globals."""
        self._execute(path, replacements, {"__name__": "__main__", **names})

    def load(self, name: str, path: str, replacements: Mapping[str, str]) -> ModuleType:
        """Import a file of the checkout as the module `name`; later imports of it get this one."""
        module = ModuleType(name)
        module.__package__ = name.rpartition(".")[0]
        sys.modules[name] = module
        self._execute(path, replacements, module.__dict__)
        return module

    def _execute(self, path: str, replacements: Mapping[str, str], names: dict[str, Any]) -> None:
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))
        names["__file__"] = str(self.folder / path)
        exec(compile(self.source(path, replacements), names["__file__"], "exec"), names)


def use_library(name: str, requirement: str) -> None:
    """Install `requirement` (PACKAGE==VERSION) for this process alone, and import module `name`.

    Its dependencies are the installed ones. Helpers of the tests may have imported the installed
    version of the module before; later imports get the new version.
    """
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    options = ["--quiet", "--no-deps", "--target", folder]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, requirement], check=True)
    sys.path.insert(0, folder)
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]
    version = requirement.rpartition("==")[2]
    if (imported := import_module(name).__version__) != version:
        raise SystemExit(f"{name}: version {imported} was imported, not {version}")


def record_run(setup: str, folder: str, run: str) -> Arrays:
    """Record one run of a set-up and return its arrays."""
    module = import_module(f"released.{setup}")
    # Released scripts that set no seed draw their initial values from this one.
    torch.manual_seed(0)
    try:
        arrays: Arrays = module.record(Clone(Path(folder), module.REPOSITORY, module.COMMIT), run)
    except SystemExit as error:
        # A process of the pool that exits would leave the pool waiting for ever.
        raise RuntimeError(f"{setup}: {run}: {error}") from error
    return arrays


def main(setup: str, folder: str) -> None:
    """Write the records of all runs of a set-up, and where they come from, as one npz file."""
    module = import_module(f"released.{setup}")
    Clone(Path(folder), module.REPOSITORY, module.COMMIT)
    origin = {
        "repository": module.REPOSITORY,
        "commit": module.COMMIT,
        "date": date.today().isoformat(),
        "versions": f"Python {sys.version.split()[0]}, torch {torch.__version__}",
    }
    arrays: Arrays = {}
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for run in module.RUNS:
            recorded = pool.apply(record_run, (setup, folder, run))
            arrays |= {f"{run}/{key}": value for key, value in recorded.items()}
            print(f"{setup}: {run}")
    np.savez_compressed(FOLDER / f"{setup}.npz", **origin, **arrays)  # type: ignore


if __name__ == "__main__":
    main(*sys.argv[1:])
