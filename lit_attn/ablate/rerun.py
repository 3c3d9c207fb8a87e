"""Cells that run again: their selection, and what becomes of their old folders."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import torch

from lit_attn.ablate.job import Job
from lit_attn.ablate.plan import Matrix
from lit_attn.cells import records
from lit_attn.cells.folder import read_result
from lit_attn.cells.inputs import MAX_FILES, change_finder, collect_data
from lit_attn.cells.lock import CellLocked, hold_lock
from lit_attn.schema.errors import ConfigError, require


def select_cells(matrices: list[Matrix], choice: str) -> list[Job]:
    """Return the stale cells, the failed cells, or the one cell that `choice` names.

    A result is stale if the code, the parts or the data have changed since. Raises ConfigError for
    an unknown cell, and if the data of a result cannot be read.
    """
    jobs: list[Job] = []
    for matrix in matrices:
        jobs += matrix.early_jobs
        jobs += matrix.jobs
    if choice == "stale":
        return list(_find_stale(jobs))
    if choice == "failed":
        return [job for job in jobs if job.state() in get_args(records.FailureClass)]
    named = [job for job in jobs if choice == job.name or Path(choice) == job.folder]
    if not named:
        names = [job.name for job in jobs]
        require("rerun: no cell", choice, ["stale", "failed", *names])
    return named


def set_aside(job: Job) -> None:
    """Rename the folder of a cell to `aside-<number>-...`, and write its config.yaml to a new one.

    Neither status nor reports read the renamed folder. A SLURM job that waits finds the config.yaml
    in the new one. Raises ConfigError if the cell is running, and OSError.
    """
    if not job.folder.exists():
        return
    try:
        with hold_lock(job.folder):
            rename_aside(job.folder)
        job.write_config()
    except CellLocked as error:
        raise ConfigError(f"rerun: {job.name} is running; stop it first") from error


def rename_aside(folder: Path) -> None:
    """Rename the folder of a cell, whose lock this process holds, to `aside-<number>-...`."""
    number = 1
    aside = folder.with_name(f"aside-{number}-{folder.name}")
    while aside.exists():
        number += 1
        aside = folder.with_name(f"aside-{number}-{folder.name}")
    folder.rename(aside)
    (aside / "lock").unlink(missing_ok=True)


def _find_stale(jobs: list[Job]) -> Iterator[Job]:
    """Yield the cells whose results were computed with other code, parts or data."""
    # The import hashes all files of the package, which other commands do without.
    from lit_attn.training.provenance import code_hash

    # Loading the data takes long, so cells with the same data share the hash.
    data_hashes: dict[str, str] = {}
    find_change = change_finder()
    for job in jobs:
        result = read_result(job.folder, job.identity)
        if result is None:
            continue
        data = job.cell.experiment.data
        weights = {str(path) for path in job.cell.experiment.input_paths()}
        weights -= {str(path) for path in data.input_paths()}
        # A module that only training imports has no other stamp here than the recorded one, and
        # weights to start with have no hash.
        code_stamps = {
            name: stamp
            for name, stamp in result.inputs.items()
            if name.endswith(".py") or name in weights
        }
        change = find_change(result.model_copy(update={"inputs": code_stamps}))
        data_stamps = collect_data(data.input_paths())
        has_new_code = change != "" or result.code != code_hash(job.cell.parts)
        if has_new_code:
            yield job
            continue
        inputs = data_stamps | code_stamps
        # Some data have no files, an empty stamp is unknown, and of many files some are recorded.
        has_all_stamps = 0 < len(data_stamps) < MAX_FILES and "" not in data_stamps.values()
        if inputs == result.inputs and has_all_stamps:
            continue
        key = data.model_dump_json()
        if key not in data_hashes:
            data_module = data.build(job.cell.seed, torch.device("cpu"))
            data_hashes[key] = str(data_module.fingerprint())
        if result.data != data_hashes[key]:
            yield job
        elif inputs != result.inputs:
            # With the new stamps, status and dry run do not report the cell any more.
            with contextlib.suppress(OSError):
                result.model_copy(update={"inputs": inputs}).write(job.folder / "result.json")
