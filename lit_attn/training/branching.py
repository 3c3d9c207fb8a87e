"""Branches of a training: how a trunk keeps them, and how a cell continues from one.

docs/studies.md (Budgets) describes what they are for, and lit_attn.cells.branches the files.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L

from lit_attn.cells.branches import (
    RECORDS,
    branch_folder,
    checkpoint_name,
    find_trunk,
    remove_branch,
    runs_folder,
)
from lit_attn.cells.folder import read_result, set_aside
from lit_attn.config.cell import Cell
from lit_attn.files import copy_atomic, rename_written
from lit_attn.schema.mistakes import first_line
from lit_attn.training.checkpoints import is_about_machine, require_readable
from lit_attn.training.process_group import ProcessGroup


@dataclass(eq=False)
class BranchKeeper(L.Callback):
    """Callback that keeps a branch before the decay of every sibling without a result.

    `siblings` are the folders of the cells with smaller budgets, by the step of their branch.
    """

    folder: Path
    siblings: dict[int, Path]
    group: ProcessGroup

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        sibling = self.siblings.get(step)
        if sibling is None or batch_idx % trainer.accumulate_grad_batches:
            return
        target = branch_folder(self.folder, step, _read_identity(sibling))
        place = self._create_place(sibling, target) if self.group.is_rank_zero else None
        place = self.group.broadcast(place)
        if place is None:
            return
        checkpoint = place / checkpoint_name(step)
        trainer.save_checkpoint(checkpoint)
        if not self.group.is_rank_zero:
            return
        # Lightning reports success even if it could not write anything.
        if not checkpoint.exists() or checkpoint.stat().st_size == 0:
            raise OSError(f"{checkpoint}: the checkpoint was not written")
        for name in RECORDS:
            if (self.folder / name).exists():
                shutil.copyfile(self.folder / name, place / name)
        rename_written(place, target)

    @staticmethod
    def _create_place(sibling: Path, target: Path) -> Path | None:
        """Return a new folder for the files of a branch, None if the branch is not needed."""
        if target.exists() or read_result(sibling, _read_identity(sibling)) is not None:
            return None
        # The folder for temporary files lies in the cell's folder, and each attempt empties it.
        place = Path(tempfile.gettempdir()) / target.name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return place


def find_branch_step(cell: Cell, steps_per_epoch: int, epochs: int) -> int | None:
    """Return the step before which a training like that of `cell` for some epochs can branch.

    Returns None if there is none, for example if a short decay is rounded to no step.
    """
    steps = cell.experiment.schedule.stable_steps(steps_per_epoch, epochs)
    if steps is None or not 0 < steps < steps_per_epoch * epochs:
        return None
    return steps


def find_siblings(cell: Cell, folder: Path, steps_per_epoch: int) -> dict[int, Path]:
    """Return the folders of the cells to which `cell` is the trunk, by the step of their branch."""
    runs = runs_folder(folder)
    siblings = {}
    for name, epochs in cell.branches.items():
        step = find_branch_step(cell, steps_per_epoch, epochs)
        if step is not None:
            siblings[step] = runs / name
    return siblings


def take_branch(cell: Cell, folder: Path, steps_per_epoch: int) -> Path | None:
    """Copy the branch for `cell` to its `folder`, and return the copied checkpoint.

    Returns None for a cell without a trunk, and if the trunk has no branch that can be read. The
    checkpoint is copied last, so without it the copies of a killed process are replaced.
    """
    trunk = find_trunk(folder, cell.trunk)
    step = find_branch_step(cell, steps_per_epoch, cell.experiment.training.epochs)
    if trunk is None or step is None:
        return None
    branch = branch_folder(trunk, step, cell.fingerprint)
    checkpoint = branch / checkpoint_name(step)
    if not branch.is_dir():
        print(f"budgets: {trunk} has no {branch.name}; training from the first step", flush=True)
        return None
    try:
        require_readable(checkpoint)
    except Exception as error:  # torch.load may raise any for a damaged file.
        if is_about_machine(error):
            raise
        reason = first_line(error)
        print(
            f"budgets: {checkpoint} does not load ({reason}); training from the first step",
            flush=True,
        )
        set_aside(branch)
        return None
    for name in RECORDS:
        if (branch / name).exists():
            copy_atomic(branch / name, folder / name)
    copied = folder / "checkpoints" / checkpoint.name
    copy_atomic(checkpoint, copied)
    print(f"budgets: continuing from step {step:,} of {trunk}", flush=True)
    return copied


def remove_used_branches(cell: Cell, folder: Path) -> None:
    """Remove the branch that a finished cell came from, and its own that no sibling needs."""
    trunk = find_trunk(folder, cell.trunk)
    if trunk is not None:
        remove_branch(trunk, cell.fingerprint)
    for name in cell.branches:
        sibling = runs_folder(folder) / name
        identity = _read_identity(sibling)
        if read_result(sibling, identity) is not None:
            remove_branch(folder, identity)


def _read_identity(cell: Path) -> str:
    """Return the identity in the name of a cell's folder, SEED-IDENTITY."""
    return cell.name.rpartition("-")[2]
