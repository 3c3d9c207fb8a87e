"""Branches: the state of a training before the decay of a shorter training with the same seed.

The cell with the largest of the `budgets` of a study, the trunk, keeps a folder for each cell with
a smaller budget until that cell has a result:

    TRUNK/checkpoints/branch-<step>-<identity>/
        step-<step>.ckpt       training state before this step
        metrics.csv, ...       the records up to this step

The identity is that of the cell that continues from the branch. The folder appears complete: it is
written elsewhere and renamed.
"""

import shutil
from pathlib import Path

RECORDS = ("metrics.csv", "clock.csv", "diagnostics.csv", "units.npz")
"""Records of a cell that depend on the steps before a branch."""


def find_trunk(cell: Path, trunk: str | None) -> Path | None:
    """Return the folder of the trunk of the cell in a folder, None for a cell without one."""
    return None if trunk is None else runs_folder(cell) / trunk


def runs_folder(cell: Path) -> Path:
    """Return the folder of runs of the cell in runs/STUDY/VARIANT/SEED-IDENTITY."""
    return cell.parent.parent.parent


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint before a step; names sort as steps do."""
    return f"step-{step:09d}.ckpt"


def branch_folder(trunk: Path, step: int, identity: str) -> Path:
    """Return the folder of the branch before `step` for the cell with this identity."""
    return trunk / "checkpoints" / f"branch-{step:09d}-{identity}"


def find_branch(trunk: Path, identity: str) -> Path | None:
    """Return the branch for the cell with this identity, None if there is none."""
    return next(trunk.glob(f"checkpoints/branch-*-{identity}"), None)


def remove_branch(trunk: Path, identity: str) -> None:
    """Remove the branch for the cell with this identity, which has a result."""
    for folder in trunk.glob(f"checkpoints/branch-*-{identity}"):
        shutil.rmtree(folder, ignore_errors=True)
