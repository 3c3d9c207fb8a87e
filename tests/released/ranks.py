"""Recordings and replays of trainings with several ranks.

The released code runs under torchrun, and this project starts its ranks itself. Each rank writes
its record to a file; the parent process checks that the ranks agree, and combines them.
"""

import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np

from lit_attn.cells.ranks import run_ranks
from released.record import Clone
from released.recording import Arrays

WORLD = 2
"""Number of ranks."""


def record(setup: str, clone: Clone, run: str) -> Arrays:
    """Run `record_rank(clone, run, rank)` of a set-up on all ranks and return the record."""
    options = ["--standalone", "--nproc-per-node", str(WORLD), "-m", "released.ranks", "record"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        subprocess.run([*command, setup, run, folder, str(clone.folder)], check=True)
        return combine(Path(folder))


def replay(module: ModuleType, run: str, folder: Path) -> Arrays:
    """Replay a run of a set-up on all ranks in `folder` and return the record."""
    command = [sys.executable, "-m", "released.ranks", "replay", module.__name__, run, str(folder)]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, env=paths, check=True)
    return combine(folder)


def combine(folder: Path) -> Arrays:
    """Return the record of all ranks: the mean of their losses, and what they have in common.

    Released ranks may draw other initial values, before they all get those of rank 0.
    """
    ranks: list[Arrays] = []
    for rank in range(WORLD):
        with np.load(folder / f"rank{rank}.npz") as archive:
            ranks.append({key: archive[key] for key in archive})
    first = ranks[0]
    for other in ranks[1:]:
        assert (first["loss"] != other["loss"]).any()
        for key in set(first) - {"loss", "initial", "deviation"}:
            np.testing.assert_array_equal(first[key], other[key], err_msg=key)
    return first | {"loss": np.mean([arrays["loss"] for arrays in ranks], axis=0)}


def main(side: str, setup: str, run: str, folder: str, clone: str = "") -> int:
    """Run one rank of a recording, or all ranks of a replay; return 0 or an exit code."""
    module = import_module(setup)
    if side == "record":
        rank = int(os.environ["RANK"])
        checkout = Clone(Path(clone), module.REPOSITORY, module.COMMIT)
        np.savez(Path(folder) / f"rank{rank}.npz", **module.record_rank(checkout, run, rank))
        return 0
    from released import replaying

    prepared = module.replay(run, Path(folder))

    def body() -> None:
        arrays = replaying.run(prepared, Path(folder))
        np.savez(Path(folder) / f"rank{os.environ['LOCAL_RANK']}.npz", **arrays)  # type: ignore

    return run_ranks(WORLD, body, None, lambda: None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
